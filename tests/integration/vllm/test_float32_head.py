"""`--hf-overrides '{"head_dtype": "float32"}'`: the head's product in float32, as vLLM's own model has it."""

from __future__ import annotations

import pytest
import torch

from tests.integration.questions import checkpoint
from tests.integration.vllm.offline import Ask, Engine, Ran, run

pytestmark = pytest.mark.vllm

PROMPTS = ["Tom has 3 apples.", "How many are left when 12 of 40 are sold?", "A", "Question:"]
#: The second is greedy and tells no logits, and so may go through our own sampler.
ASKS = [Ask(PROMPTS, {"max_tokens": 1, "logprobs": 20}), Ask(PROMPTS, {"max_tokens": 1})]
FLOAT32 = {"hf_overrides": {"head_dtype": "float32"}}
OPTIONS = {"dtype": "bfloat16", "enforce_eager": True, "logprobs_mode": "raw_logits"}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
#: Half a step of bfloat16, as a share of the number.
ROUNDING = 2**-8
#: Of logits, as a share of their spread: hidden states of 16 bits are rounded in another order by another model.
SIXTEEN_BITS = 0.1
#: Tied, not tied, of experts.
FAMILIES = ("llama", "qwen3", "qwen3_moe")


def logits(ran: Ran) -> list[dict[str, float]]:
    """Those of the likeliest first tokens, by prompt."""
    return [answer.logprobs[0] for answer in ran.answers[0]]


def are_rounded(ran: Ran) -> bool:
    """Whether all logits are numbers of bfloat16."""
    values = torch.tensor([value for row in logits(ran) for value in row.values()])
    return torch.equal(values, values.bfloat16().float())


def distance(one: Ran, other: Ran) -> float:
    """Largest |difference| of logits that both tell, as a share of the largest logit."""
    pairs = list(zip(logits(one), logits(other), strict=True))
    far = max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())
    return far / max(abs(value) for row in logits(one) for value in row.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_not_rounded_and_close_to_vllms_own(family):
    ways = [("auto", {}), ("auto", FLOAT32), ("atom", {}), ("atom", FLOAT32)]
    ways += [("atom", {**FLOAT32, **TWO})] if family == "llama" else []
    ran = run([Engine(checkpoint(family), impl, ASKS, {**OPTIONS, **options}) for impl, options in ways])
    (native, native_wide, rounded), ours = ran[:3], ran[3:]
    assert are_rounded(native)
    assert are_rounded(rounded)
    assert not are_rounded(native_wide)
    for wide in ours:
        assert wide.model_class.startswith("Atom")
        assert not are_rounded(wide)
        assert distance(wide, native_wide) <= SIXTEEN_BITS
        assert [it.tokens for it in wide.answers[1]] == [it.tokens for it in wide.answers[0]]
    # The hidden states are the same, and the logits those that were rounded.
    assert distance(ours[0], rounded) <= ROUNDING * 1.01
