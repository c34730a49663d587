"""Triton's interpreter, with casts that hold for FP8."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture
def exact_fp8_casts(monkeypatch):
    """torch's casts between float32, float16 and FP8 in the interpreter.

    Its own, as of Triton 3.9, lose the carry where rounding moves a number to the next power of two, and make numbers
    of FP8's NaN. A GPU's do neither.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
    }
    own = interpreter._convert_float

    def convert(data, source, target, rounding):
        if source not in dtypes or target not in dtypes:
            return own(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(f"uint{source.primitive_bitwidth}")
        found = torch.from_numpy(bits).view(dtypes[source]).to(dtypes[target])
        unsigned = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[target.primitive_bitwidth]
        return found.view(unsigned).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


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
