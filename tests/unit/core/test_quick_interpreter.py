"""Kernels in the quicker interpreter compute what they should, and leave Triton's language as it was."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests import quick_interpreter


@triton.jit
def _doubled(x):
    return tl.sum(x, 0) * 2


@triton.jit
def _kernel(x, out, count, by, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    fits = at < count
    moved = tl.load(x + at, fits, 0).to(tl.float32)[:, None] + tl.zeros((1, 4), tl.float32)
    tl.store(out + at, _doubled(tl.trans(moved).reshape(4 * SIZE)) + (at * by).to(tl.float32), fits)


def run(by: int) -> torch.Tensor:
    """The kernel's result for ``by``."""
    x, out = torch.arange(10, dtype=torch.float16), torch.full((10,), torch.nan)
    _kernel[(3,)](x, out, 10, by, SIZE=4)
    return out


def expected() -> torch.Tensor:
    """With ``by`` 3: of each block of four, eight times its sum, and three times each number's place."""
    x = torch.arange(12.0).where(torch.arange(12) < 10, 0.0)
    return (8 * x.view(3, 4).sum(1).repeat_interleave(4) + 3 * torch.arange(12.0))[:10]


def is_tritons_own() -> bool:
    return not interpreter._patch_lang.done and tl.core.is_builtin(tl.load)


def test_a_kernel_that_calls_others_gives_the_same_each_time():
    assert isinstance(interpreter._patch_lang, quick_interpreter._Patches)
    for _ in range(2):
        assert run(3).equal(expected())
        assert is_tritons_own()


@triton.jit
def _faulty(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), _doubled(tl.arange(0, 2 * SIZE))[:, None])


def test_one_that_fails_leaves_no_trace():
    with pytest.raises(interpreter.InterpreterError):
        _faulty[(1,)](torch.zeros(4), SIZE=4)
    assert is_tritons_own()
    assert run(3).equal(expected())


def test_while_another_thread_s_launch_runs_the_language_stays_the_interpreter_s():
    with interpreter._patch_lang.launch():
        assert run(3).equal(expected())
        assert not is_tritons_own()
        assert run(3).equal(expected())
    assert is_tritons_own()


def test_a_function_that_the_host_calls_is_no_launch():
    assert tl.cdiv(7, 2) == 4
    assert run(3).equal(expected())
    assert not interpreter._patch_lang.launches
