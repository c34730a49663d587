"""Hugging Face's own model of a checkpoint, one prompt after the other: what every other way must come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a sequence."""

    logprobs: torch.Tensor
    """`[T, vocabulary]`: row `t` is of the token after position `t`."""
    spread: float
    """Between the largest and the smallest logit."""


class HuggingFace:
    """A checkpoint in float32."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)  # quicker for steps this small
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy_along(self, prompt: str, answer: Sequence[int], past_the_end: bool = False) -> list[int]:
        """Its own greedy tokens after a prompt and each part of an answer: the answer, if that is its greedy one.

        One pass has them all, where taking one token after the other takes as many.

        Args:
            prompt: its text.
            answer: tokens.
            past_the_end: whether it must not take tokens that end an answer.
        """
        tokens = self.tokenizer(prompt).input_ids
        logprobs = self.scores([*tokens, *answer[:-1]]).logprobs[len(tokens) - 1 :]
        if past_the_end:
            logprobs[:, self.model.generation_config.eos_token_id] = -torch.inf
        found: list[int] = logprobs.argmax(-1).tolist()
        return found

    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> Scores:
        """What it thinks of `tokens`."""
        (logits,) = self.model(torch.tensor([list(tokens)])).logits
        return Scores(logits.log_softmax(-1), float(logits.max() - logits.min()))
