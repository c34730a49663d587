"""Greedy tokens are those of vLLM's own model, for every family and on every path through our code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atom_core.kernels import OPS
from tests.integration.once import once
from tests.integration.questions import BY_VECTORS, FAMILIES, checkpoint, right_tokens
from tests.integration.vllm.conftest import ANSWER, NUM_FEW
from tests.integration.vllm.offline import Ask, Engine, Ran, run

pytestmark = pytest.mark.vllm

CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
}
SMALL_CHUNKS = {"enable_prefix_caching": False, "max_num_batched_tokens": 128, "max_num_seqs": 32}
REFERENCE_KERNELS = ",".join(f"{op.name}={op.implementations[-1].name}" for op in OPS)
#: Each target's draft models.
DRAFTS = {"llama": ("llama", "mistral"), "mistral": ("qwen3",)}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def ran(rows) -> Callable[[str], dict[str, Ran]]:
    """Our engines of a family on paths beside the usual one, by name: one after the other in one process."""
    few = [Ask([row.prompt for row in rows[:NUM_FEW]], ANSWER)]

    @once
    def ran(family: str) -> dict[str, Ran]:
        def ours(environ: Mapping[str, str] | None = None, **options: Any) -> Engine:
            return Engine(checkpoint(family), "atom", few, options, environ or {})

        engines = {
            "small chunks": ours(**SMALL_CHUNKS),
            "vLLM's attention": ours({"ATOM_DISABLE_VLLM_ATTENTION": "1"}),
            "reference kernels": ours({"ATOM_KERNELS": REFERENCE_KERNELS}, **BY_VECTORS),
        }
        for draft in DRAFTS.get(family, ()):
            speculation = {"method": "draft_model", "model": checkpoint(draft), "num_speculative_tokens": 3}
            engines[f"drafts by {draft}"] = ours(speculative_config=speculation)
        # The last: where drafts from the prompt have imported Numba, vLLM 0.32 does not start another engine.
        if family == "qwen3":
            engines["drafts out of the prompt"] = ours(speculative_config=NGRAM)
        return dict(zip(engines, run(list(engines.values())), strict=True))

    return ran


def tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.smoke), *FAMILIES[1:]])
def test_every_held_out_prompt_gets_vllms_tokens_also_from_the_prefix_cache(family, both, rows):
    expected, ran = both(family)
    assert expected.model_class == CLASSES[family]
    assert ran.model_class == f"Atom{CLASSES[family]}"
    assert "VllmPagedAttention" in ran.layer_classes
    right = right_tokens(family, rows)
    assert tokens(ran.answers[0]) == right
    assert tokens(expected.answers[0]) == right[: len(expected.answers[0])]
    assert tokens(ran.answers[1]) == tokens(expected.answers[0][:NUM_FEW])
    assert ran.counters["vllm:prefix_cache_hits"] >= NUM_FEW * 128


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_other_attention_and_reference_kernels_give_the_same_tokens(family, native, ran):
    names = ("small chunks", "vLLM's attention", "reference kernels")
    chunked, framework, reference = (ran(family)[name] for name in names)
    expected = tokens(native(family).answers[0][:NUM_FEW])
    assert tokens(chunked.answers[0]) == expected
    assert "FrameworkAttention" in framework.layer_classes
    assert "VllmPagedAttention" not in framework.layer_classes
    assert tokens(framework.answers[0]) == expected
    assert set(reference.kernels.values()) == {"reference", "separate"}
    assert tokens(reference.answers[0]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), [(target, draft) for target, names in DRAFTS.items() for draft in names])
def test_a_draft_model_runs_on_our_class_and_changes_no_token(target, draft, native, ran):
    drafted_by = ran(target)[f"drafts by {draft}"]
    assert drafted_by.model_class == f"Atom{CLASSES[target]}"
    assert drafted_by.draft_class == f"Atom{CLASSES[draft]}"
    assert tokens(drafted_by.answers[0]) == tokens(native(target).answers[0][:NUM_FEW])
    # Every checkpoint knows every answer, so a draft that computes what it should is nearly always right.
    drafted, accepted = (drafted_by.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted * 0.9 < accepted <= drafted


@pytest.mark.slow
def test_drafts_out_of_the_prompt_change_no_token(native, ran):
    drafted = ran("qwen3")["drafts out of the prompt"]
    assert tokens(drafted.answers[0]) == tokens(native("qwen3").answers[0][:NUM_FEW])
    proposed, accepted = (drafted.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert 0 < accepted < proposed


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(native, rows):
    prompts = [row.prompt for row in rows[:NUM_FEW]]
    families = ("qwen3", "mistral")
    engines = [Engine(checkpoint(family), "atom", [Ask(prompts, ANSWER)], TWO_RANKS) for family in families]
    for family, ran in zip(families, run(engines), strict=True):
        assert ran.model_class == f"Atom{CLASSES[family]}"
        assert tokens(ran.answers[0]) == tokens(native(family).answers[0][:NUM_FEW])


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_tokens(native, rows):
    prompts = [row.prompt for row in rows[:NUM_FEW]]
    engine = Engine(checkpoint("qwen3"), "atom", [Ask(prompts, ANSWER)])
    (ran,) = run([engine], script=Path(__file__).with_name("compiled.py"), environ={"TORCHDYNAMO_DISABLE": None})
    assert ran.model_class == "AtomQwen3ForCausalLM"
    assert ran.compiled
    assert tokens(ran.answers[0]) == tokens(native("qwen3").answers[0][:NUM_FEW])


@pytest.mark.slow
def test_a_model_that_was_warmed_up_gives_the_same_tokens(native, rows):
    prompts = [row.prompt for row in rows[:NUM_FEW]]
    families = ("qwen3", "mistral")
    engines = [Engine(checkpoint(family), "atom", [Ask(prompts, ANSWER)], SMALL_CHUNKS) for family in families]
    for family, ran in zip(families, run(engines, script=Path(__file__).with_name("warmed.py")), strict=True):
        assert ran.model_class == f"Atom{CLASSES[family]}"
        assert tokens(ran.answers[0]) == tokens(native(family).answers[0][:NUM_FEW])
