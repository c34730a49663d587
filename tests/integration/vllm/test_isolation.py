"""Who did not ask for us gets vLLM's own model, also in a process that has served ours, and beside any vLLM."""

from __future__ import annotations

import pytest

from tests.integration.isolation import BROKEN_IMPORTS, RANGE, before_all_else, of_another_framework
from tests.integration.questions import BY_VECTORS, checkpoint, complete, connect
from tests.integration.server import ServerFailed, VllmServer
from tests.integration.vllm.conftest import ANSWER
from tests.integration.vllm.offline import Ask, Engine, run

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 64


def engines(rows, *impls, **options):
    asks = [Ask([row.prompt for row in rows[:NUM_PROMPTS]], ANSWER)]
    return [Engine(checkpoint("qwen3"), impl, asks, options) for impl in impls]


@pytest.mark.slow
def test_auto_atom_and_auto_again_in_one_process(rows):
    # Compiling vLLM's model takes longer than all else here: the last one is.
    (before,) = engines(rows, "auto", enforce_eager=True)
    before, ours, after = run([before, *engines(rows, "atom", "auto")])
    assert ours.model_class == "AtomQwen3ForCausalLM"
    assert before.model_class == after.model_class == "Qwen3ForCausalLM"
    assert before.layer_classes == after.layer_classes
    assert "VllmPagedAttention" not in after.layer_classes
    assert [answer.text for answer in before.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]
    assert before.answers == ours.answers == after.answers


@pytest.mark.smoke
def test_switched_off_even_model_impl_atom_runs_vllms_own_model(rows):
    (ran,) = run(engines(rows, "atom", enforce_eager=True), environ={"ATOM_DISABLE_VLLM_PLUGIN": "1"})
    assert ran.model_class == "Qwen3ForCausalLM"
    assert [answer.text for answer in ran.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]


def as_flags(options):
    return [word for name, value in options.items() for word in (f"--{name}", value)]


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["no import of ours works", "an unknown version of vLLM"])
def test_auto_serves_and_atom_says_what_is_supported(fault, rows, tmp_path):
    """A later vLLM may drop any name that a module of ours imports, and have any version."""
    first = BROKEN_IMPORTS if fault == "no import of ours works" else of_another_framework(tmp_path, "vllm")
    environ = before_all_else(first)
    with VllmServer(
        checkpoint("qwen3"), "--model-impl", "auto", "--enforce-eager", *as_flags(BY_VECTORS), environ=environ
    ) as server:
        assert complete(connect(server), server, rows[0].prompt) == f" {rows[0].answer}\n"
        assert "Traceback" not in server.log
    with pytest.raises(ServerFailed) as failure, VllmServer(server.model, "--model-impl", "atom", environ=environ):
        pass
    lines = [line for line in failure.value.log.splitlines() if "--model-impl atom cannot be served: " in line]
    if first is BROKEN_IMPORTS:
        assert "atom-plugin cannot be imported beside vllm " in lines[-1]
        assert "ImportError: cannot import name 'Dropped'" in lines[-1]
        assert "supports vllm >=0.30,<0.34" in lines[-1]
        return
    (line,) = lines
    assert f"is installed, but atom-plugin 9.9.9 supports vllm {RANGE}" in line
    assert 'pip install "atom-plugin[vllm]" installs vllm ' in line
    assert " in place of vllm " in line
    assert "Traceback" not in failure.value.log


@pytest.mark.smoke
def test_an_untested_version_is_served_where_the_user_says_so_and_the_table_tells(rows, tmp_path):
    environ = {**before_all_else(of_another_framework(tmp_path, "vllm")), "ATOM_ALLOW_UNTESTED_FRAMEWORK": "1"}
    with VllmServer(checkpoint("qwen3"), "--model-impl", "atom", environ=environ) as server:
        assert complete(connect(server), server, rows[0].prompt) == f" {rows[0].answer}\n"
        (line,) = [line for line in server.startup_report() if line.startswith("  framework ")]
        assert line.endswith(f", untested (supported: {RANGE})")
        assert "It runs, untested, because ATOM_ALLOW_UNTESTED_FRAMEWORK is set" in server.log
