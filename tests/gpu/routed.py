"""Routed experts beside Hugging Face's routers, where 16 bits may turn one of two experts that are as likely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.questions import checkpoint
from tests.unit.core.hugging_face import routed_experts

#: Trained mixtures, and which layer counts all of a model's.
MIXTURES = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3")
PROMPTS = [
    "12 + 5 =",
    "Question: What is 3 plus 4?\nAnswer:",
    "Tom has 3 apples, and Ann has 8 more than he has. How many apples have they? " * 4,
]
#: Of the choices of a token in a layer: all experts are those of the router in float32.
ALIKE = 0.97


def share_alike(family: str, answers: Iterable[tuple[str, list[int], Sequence[Sequence[Sequence[int]]]]]) -> float:
    """Of prompts with their new tokens and, by token and layer, the experts that were told, how many are right."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(family))
    right = total = 0
    for prompt, tokens, told in answers:
        # From the last new token nothing was computed.
        expected = routed_experts(model, [*tokenizer.encode(prompt), *tokens[:-1]])
        for layer, chosen in expected.items():
            assert len(told) == len(chosen), "experts of every token but the last"
            right += sum(sorted(one[layer]) == sorted(other) for one, other in zip(told, chosen, strict=True))
            total += len(chosen)
    return right / total
