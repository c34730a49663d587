"""Who did not ask for us gets vLLM's own model, also in a process that has served ours."""

from __future__ import annotations

import pytest

from tests.integration.questions import checkpoint
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
