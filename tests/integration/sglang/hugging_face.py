"""Hugging Face's own model of a checkpoint, one prompt after the other: what every other way must come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


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

    def greedy(self, prompt: str, max_tokens: int, min_tokens: int = 0) -> list[int]:
        """The tokens of the greedy answer, the one that ends it among them; it does not end before `min_tokens`."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens,
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=0,
        )
        (found,) = self.model.generate(**inputs, generation_config=config)
        tokens: list[int] = found[inputs.input_ids.shape[1] :].tolist()
        return tokens

    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> Scores:
        """What it thinks of `tokens`."""
        (logits,) = self.model(torch.tensor([list(tokens)])).logits
        return Scores(logits.log_softmax(-1), float(logits.max() - logits.min()))
