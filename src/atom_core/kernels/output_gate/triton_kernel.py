"""The output gate in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, launch_options

_BLOCK = 1024


@entry_kernel
@triton.jit
def _multiply_by_gate(out, gate, stride_gate, N, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = columns < N
    value = tl.load(out + row * N + columns, mask=used, other=0.0).to(tl.float32)
    given = tl.load(gate + row * stride_gate + columns, mask=used, other=0.0).to(tl.float32)
    value /= 1.0 + tl.exp(-given)
    tl.store(out + row * N + columns, value.to(out.dtype.element_ty), mask=used, eviction_policy=EVICT_LAST)


def multiply_by_gate(out: torch.Tensor, gate: torch.Tensor, overlap: bool) -> None:
    """See :mod:`atom_core.kernels.output_gate`; ``overlap``: see :func:`triton_support.overlaps`."""
    rows, size = gate.shape
    assert gate.stride(1) == 1
    assert out.is_contiguous()
    assert out.numel() == gate.numel()
    if rows:
        choice = {"BLOCK": _BLOCK, "OVERLAP": overlap, "num_warps": 4}
        grid = (rows, cdiv(size, _BLOCK))
        _multiply_by_gate[grid](out, gate, gate.stride(0), size, **choice, **launch_options(overlap))
