"""The likeliest tokens on a GPU, also within a captured graph, which each replay reads anew."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.greedy_tokens import GREEDY_TOKENS, GreedyTokensSpec
from atom_core.kernels.select import Target
from tests.greedy_cases import CASES, GreedyCase, Logits

DEVICE = torch.device("cuda")
LARGE = {"DeepSeek V2-Lite's head, 256 rows": GreedyCase(256, 102_400, barred=1)}


@pytest.mark.parametrize("case", [*CASES.values(), *LARGE.values()], ids=[*CASES, *LARGE])
def test_the_first_of_the_likeliest_tokens_that_may_be_taken(case):
    spec = GreedyTokensSpec(case.vocab_size)
    kernel = kernel_set(Target.of(DEVICE), with_aiter=False).select(GREEDY_TOKENS, spec)
    logits = Logits(case, DEVICE)
    logits.check(logits.run(kernel))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = logits.run(kernel)
    later = Logits(case, DEVICE, seed=1)
    for name in ("logits", "requests", "positions"):
        getattr(logits, name).copy_(getattr(later, name))
    if logits.barred is not None:
        for mine, other in zip(logits.barred, later.barred, strict=True):
            mine.copy_(other)
    graph.replay()
    later.check(found)
