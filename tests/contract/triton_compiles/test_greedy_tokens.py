"""Greedy sampling compiles for each GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.kernels.greedy_tokens import Barred, GreedyTokensSpec
from atom_core.kernels.greedy_tokens import triton_kernel as greedy_kernel
from tests.contract.triton_compiles.compiling import compile_launch, every_gpu, keep, zeros


@every_gpu
@pytest.mark.parametrize("least", [False, True], ids=["all tokens", "some barred"])
def test_greedy_tokens_compile(monkeypatch, least, gpu):
    kept = keep(monkeypatch, (greedy_kernel, "_best_of_splits"), (greedy_kernel, "_best_of_rows"))
    ints = partial(torch.zeros, dtype=torch.int32)
    barred = Barred(ints(8), ints(8), ints(8, 128)) if least else None
    kernel = greedy_kernel.TritonGreedyTokens(GreedyTokensSpec(102_400))
    kernel(zeros(3, 102_400), ints(3), torch.zeros(3, dtype=torch.int64), barred)
    launched = kept()
    assert len(launched) == 2
    for each, launch in launched:
        compile_launch(each, launch, gpu)
