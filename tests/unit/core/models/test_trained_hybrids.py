"""The trained hybrids: what is asked for stands hundreds of tokens before, and only the states have it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from atom_core.cache import StateView
from atom_core.standalone import Runner
from benchmarks import CHECKPOINTS, ROOT

RECALL = ROOT / "tests" / "evaluation" / "recall.jsonl"
#: Tokens of a step, and how far from a prompt's end states are dropped once.
CHUNK, NEAR = 64, 200
#: Tokens of the longest answer, with its newline.
ANSWER = 8

every_hybrid = pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])


class Recall:
    """A trained model, and questions for a word that a prompt began with."""

    def __init__(self, name, count):
        self.runner = Runner(CHECKPOINTS / name, max_model_len=1024)
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
        rows = [json.loads(line) for line in RECALL.read_text(encoding="utf-8").splitlines()][:count]
        self.prompts = [self.tokenizer(row["prompt"]).input_ids for row in rows]
        self.answers = [f"{row['answer']}\n" for row in rows]

    def right(self, drops=lambda done, length: False):
        """How many answers are right; behind ``done`` of ``length`` tokens a state is set to 0 where ``drops`` says.

        Prompts are cut up, at each 64th token and 200 before their end.
        """
        requests = range(len(self.prompts))
        caches, done, found = self.runner.caches(len(requests)), [0 for _ in requests], [[] for _ in requests]
        states = [cache for cache in caches.values() if isinstance(cache, StateView)]
        while min(map(len, found)) < ANSWER:
            new = [self.next_tokens(request, done[request], found[request]) for request in requests]
            ends = self.runner.step(caches, done, new)[torch.tensor([len(it) for it in new]).cumsum(0) - 1]
            tokens = self.runner.model.logits(ends).argmax(-1).tolist()
            for request, prompt in enumerate(self.prompts):
                done[request] += len(new[request])
                if done[request] >= len(prompt):
                    found[request].append(tokens[request])
                elif drops(done[request], len(prompt)):
                    for tensor in (tensor for cache in states for tensor in cache.tensors):
                        tensor[1 + request] = 0
        texts = [self.tokenizer.decode(tokens).lstrip() for tokens in found]
        return sum(text.startswith(answer) for text, answer in zip(texts, self.answers, strict=True))

    def next_tokens(self, request, done, found):
        """What a request brings to its next step."""
        prompt = self.prompts[request]
        if done >= len(prompt):
            return found[-1:]
        ends = (done + CHUNK - done % CHUNK, len(prompt) - NEAR, len(prompt))
        return prompt[done : min(end for end in ends if end > done)]


@every_hybrid
@torch.inference_mode()
def test_they_remember_what_their_prompts_began_with(name):
    recall = Recall(name, 8)
    assert min(map(len, recall.prompts)) > NEAR
    assert recall.right() == 8
    together = recall.runner.generate(recall.prompts, ANSWER)
    texts = [recall.tokenizer.decode(tokens).lstrip() for tokens in together]
    assert all(text.startswith(answer) for text, answer in zip(texts, recall.answers, strict=True)), texts


@every_hybrid
@torch.inference_mode()
def test_states_that_are_dropped_are_missed(name):
    """So a framework that loses them fails on these prompts."""
    recall = Recall(name, 10)
    assert recall.right(lambda done, length: True) <= 4
    assert recall.right(lambda done, length: done == length - NEAR) <= 4


@every_hybrid
def test_they_are_small_enough_to_keep(name):
    assert (CHECKPOINTS / name / "model.safetensors").stat().st_size <= 4_000_000
