"""Who did not ask for us, or asks for what only SGLang has, gets SGLang's own model, beside any SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.checkpoint_damage import damaged
from tests.integration.isolation import BROKEN_IMPORTS, RANGE, before_all_else, of_another_framework
from tests.integration.questions import checkpoint, complete, connect
from tests.integration.server import ServerFailed, SglangServer
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

NUM_PROMPTS = 64
# Holds the one function of vLLM's that SGLang's own rope imports on a CPU.
STAND_INS = Path(__file__).with_name("stand_ins")


@pytest.mark.slow
def test_without_the_variable_sglangs_own_model_runs_and_gives_the_same_tokens(rows):
    asks = [Ask([row.prompt for row in rows[:NUM_PROMPTS]])]
    engines = [Engine(checkpoint("qwen3"), ours, asks) for ours in (True, False)]
    ours, native = run(engines, environ=before_all_else(STAND_INS))
    assert "atom-plugin serves" in ours.log
    assert not any(word in native.log for word in ("atom-plugin serves", "atom-plugin has", "SglangRadixAttention"))
    assert [answer.text for answer in native.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]
    assert [answer.tokens for answer in native.answers[0]] == [answer.tokens for answer in ours.answers[0]]


def test_an_architecture_that_only_sglang_has_runs_there_and_one_line_says_so(tmp_path):
    asks = [Ask(["Question:"], {"max_new_tokens": 4, "ignore_eos": True})]
    options = {"load_format": "dummy", "dtype": "float32"}
    (ran,) = run([Engine(damaged("opt", tmp_path), True, asks, options)])
    assert len(ran.answers[0][0].tokens) == 4
    assert "atom-plugin serves" not in ran.log
    (line,) = [line for line in ran.log.splitlines() if "atom-plugin has" in line]
    assert "atom-plugin has no model for OPTForCausalLM" in line
    assert "SGLang runs its own" in line


def test_its_own_model_serves_where_nothing_of_ours_can_be_imported_beside_a_version_we_do_not_know(rows, tmp_path):
    site = of_another_framework(tmp_path, "sglang")
    environ = {**before_all_else(BROKEN_IMPORTS, site, STAND_INS), "SGLANG_EXTERNAL_MODEL_PACKAGE": None}
    with SglangServer(checkpoint("qwen3"), environ=environ, by_command=True) as server:
        assert complete(connect(server), server, rows[0].prompt) == f" {rows[0].answer}\n"
    assert "Failed to execute general plugin" not in server.log


@pytest.mark.parametrize("fault", ["no import of ours works", "an unknown version of SGLang"])
def test_asked_for_beside_such_a_version_one_line_says_what_is_supported(fault, tmp_path):
    broken = fault == "no import of ours works"
    first = BROKEN_IMPORTS if broken else of_another_framework(tmp_path, "sglang")
    server = SglangServer(checkpoint("qwen3"), environ=before_all_else(first), by_command=True)
    with pytest.raises(ServerFailed) as failure, server:
        pass
    assert "Traceback" not in failure.value.log
    begins = "SGLANG_EXTERNAL_MODEL_PACKAGE=atom_plugin.sglang.models cannot be served: "
    (line,) = [line for line in failure.value.log.splitlines() if begins in line]
    if broken:
        assert "atom-plugin cannot be imported with sglang 0.5.23 (ImportError: cannot import name 'Dropped'" in line
        assert "supports sglang >=0.5.23,<0.6" in line
    else:
        assert f"sglang 0.5.23 is installed, but atom-plugin 9.9.9 supports sglang {RANGE}" in line
        assert 'pip install "atom-plugin[sglang]" installs sglang 0.5.23' in line


def test_an_untested_version_is_served_where_the_user_says_so_and_the_table_tells(tmp_path):
    environ = {**before_all_else(of_another_framework(tmp_path, "sglang")), "ATOM_ALLOW_UNTESTED_FRAMEWORK": "1"}
    asks = [Ask(["Question:"], {"max_new_tokens": 4})]
    (ran,) = run([Engine(checkpoint("qwen3"), True, asks)], environ=environ)
    assert f"framework  sglang 0.5.23, untested (supported: {RANGE})" in ran.log
    assert "It runs, untested, because ATOM_ALLOW_UNTESTED_FRAMEWORK is set" in ran.log
