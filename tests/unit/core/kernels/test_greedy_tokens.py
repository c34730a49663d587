"""The likeliest tokens of rows of logits."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.greedy_tokens import GREEDY_TOKENS, Barred, GreedyTokensSpec
from atom_core.kernels.greedy_tokens.triton_kernel import TritonGreedyTokens
from atom_core.kernels.select import Target
from tests.greedy_cases import CASES, Logits

CPU = Target("cpu", "x86_64")


def chosen(spec):
    return kernel_set(CPU).select(GREEDY_TOKENS, spec)


every_kernel = pytest.mark.parametrize("make", [chosen, TritonGreedyTokens], ids=["on a CPU", "triton"])


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_first_of_the_likeliest_tokens_that_may_be_taken(case, make):
    logits = Logits(case)
    logits.check(logits.run(make(GreedyTokensSpec(case.vocab_size))))


@every_kernel
def test_a_row_that_may_take_nothing_gives_a_token_there_is(make):
    rows = torch.full((2, 70), -torch.inf)
    rows[1, 3] = 0.0
    ones = torch.ones(2, dtype=torch.int32)
    barred = Barred(100 * ones, ones, torch.full((2, 1), 3, dtype=torch.int32))
    assert make(GreedyTokensSpec(70))(rows, torch.arange(2), torch.arange(2), barred).tolist() == [0, 0]
    assert make(GreedyTokensSpec(70))(rows, torch.arange(2), torch.arange(2)).tolist() == [0, 3]


@every_kernel
def test_logits_stay_as_they_are(make):
    logits = Logits(CASES["one row"])
    before = logits.logits.clone()
    logits.run(make(GreedyTokensSpec(5000)))
    assert torch.equal(logits.logits, before)


@every_kernel
def test_no_rows(make):
    none = torch.zeros(0, dtype=torch.int64)
    assert make(GreedyTokensSpec(70))(torch.zeros(0, 70), none, none).shape == (0,)
