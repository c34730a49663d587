"""Triton's interpreter, with casts and products that hold for bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture
def exact_bfloat16(monkeypatch):
    """Casts to bfloat16 in the interpreter round to the nearest, and products of bfloat16 are summed in float32.

    Its own, as of Triton 3.9, cut digits off, and multiply the integers of 16 bits that it holds such numbers as.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    own_convert, own_multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data, source, target, rounding):
        if (source, target) != (tl.float32, tl.bfloat16):
            return own_convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.float32)
        return torch.from_numpy(bits).bfloat16().view(torch.uint16).numpy()

    def multiply(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            wide = ((it.data.astype(np.uint32) << 16).view(np.float32) for it in (a, b))
            a, b = (interpreter.TensorHandle(it, tl.float32) for it in wide)
        return own_multiply(self, a, b, d, input_precision, max_num_imprecise_acc)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
