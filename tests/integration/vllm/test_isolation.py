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
    before, ours, after = run([before, *engines(rows, "atom", "auto")], environ={"TORCHDYNAMO_DISABLE": None})
    assert ours.model_class == "AtomQwen3ForCausalLM"
    assert before.model_class == after.model_class == "Qwen3ForCausalLM"
    assert before.layer_classes == after.layer_classes
    assert "VllmPagedAttention" not in after.layer_classes
    assert [answer.text for answer in before.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]
    assert before.answers == ours.answers == after.answers


def test_switched_off_even_model_impl_atom_runs_vllms_own_model(rows):
    (ran,) = run(engines(rows, "atom", enforce_eager=True), environ={"ATOM_DISABLE_VLLM_PLUGIN": "1"})
    assert ran.model_class == "Qwen3ForCausalLM"
    assert [answer.text for answer in ran.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]


def test_auto_serves_where_nothing_of_ours_can_be_imported_beside_a_version_we_do_not_know(rows, tmp_path):
    """A later vLLM may drop any name that a module of ours imports, and has a version that we do not know."""
    environ = before_all_else(BROKEN_IMPORTS, of_another_framework(tmp_path, "vllm"))
    flags = [word for name, value in BY_VECTORS.items() for word in (f"--{name}", value)]
    flags = ("--model-impl", "auto", "--enforce-eager", *flags)
    with VllmServer(checkpoint("qwen3"), *flags, environ=environ, by_command=True) as server:
        assert complete(connect(server), server, rows[0].prompt) == f" {rows[0].answer}\n"
        assert "Traceback" not in server.log


def last_line_of_refused(environ):
    """The last line of what a server that cannot start for `--model-impl atom` prints, and all of it."""
    server = VllmServer(checkpoint("qwen3"), "--model-impl", "atom", environ=environ, by_command=True)
    with pytest.raises(ServerFailed) as failure, server:
        pass
    lines = failure.value.log.splitlines()
    return next(line for line in reversed(lines) if "--model-impl atom cannot be served: " in line), failure.value.log


def test_atom_names_the_supported_versions_where_nothing_of_ours_can_be_imported():
    line, _ = last_line_of_refused(before_all_else(BROKEN_IMPORTS))
    assert "atom-plugin cannot be imported with vllm " in line
    assert "ImportError: cannot import name 'Dropped'" in line
    assert "supports vllm >=0.30,<0.34" in line


def test_atom_is_refused_in_one_line_beside_a_version_we_do_not_know(tmp_path):
    line, log = last_line_of_refused(before_all_else(of_another_framework(tmp_path, "vllm")))
    assert f"is installed, but atom-plugin 9.9.9 supports vllm {RANGE}" in line
    assert 'pip install "atom-plugin[vllm]" installs vllm ' in line
    assert " in place of vllm " in line
    assert log.count("cannot be served") == 1
    assert "Traceback" not in log


def test_an_untested_version_is_served_where_the_user_says_so_and_the_table_tells(rows, tmp_path):
    environ = {**before_all_else(of_another_framework(tmp_path, "vllm")), "ATOM_ALLOW_UNTESTED_FRAMEWORK": "1"}
    with VllmServer(checkpoint("qwen3"), "--model-impl", "atom", environ=environ, by_command=True) as server:
        assert complete(connect(server), server, rows[0].prompt) == f" {rows[0].answer}\n"
        (line,) = [line for line in server.startup_report() if line.startswith("  framework ")]
        assert line.endswith(f", untested (supported: {RANGE})")
        assert "It runs, untested, because ATOM_ALLOW_UNTESTED_FRAMEWORK is set" in server.log
