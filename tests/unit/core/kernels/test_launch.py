"""How kernels are launched where Triton's interpreter runs them, and the numbers that make a grid.

What compiled kernels do is in tests/contract/test_entry_kernels.py.
"""

from __future__ import annotations

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from atom_core.kernels.gated_sum import triton_kernel as gated_sum
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, next_power_of_2


def test_what_the_interpreter_runs_is_launched_by_the_interpreter():
    kernel = gated_sum._gated_sum
    assert isinstance(kernel, InterpretedFunction)
    assert entry_kernel(kernel) is kernel
    x, y, out = torch.ones(2, 8), torch.full((2, 8), 3.0), torch.empty(2, 8)
    kernel[2, 1](x, y, torch.zeros(2, 1), out, 8, 8, 1, 8, BLOCK=8, OVERLAP=False)
    assert torch.equal(out, torch.full((2, 8), 2.5))


def test_numbers_of_a_grid_are_tritons():
    numbers = (*range(70), 1000, 4095, 4096, 4097, 2**31 - 1, 2**31 + 1)
    assert [next_power_of_2(it) for it in numbers] == [triton.next_power_of_2(it) for it in numbers]
    assert [cdiv(it, 64) for it in numbers] == [triton.cdiv(it, 64) for it in numbers]
