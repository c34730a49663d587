"""Gated activation in Triton: float32 arithmetic, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, launch_options

#: The kernels' numbers for :data:`atom_core.types.Activation`.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
_BLOCK = 1024


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """``act(gate) * up`` in float32: SiLU, GELU (erf), GELU (tanh), the clamped SwiGLU."""
    if KIND == 0:
        return gate / (1.0 + tl.exp(-gate)) * up
    if KIND == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    if KIND == 3:
        # Comparisons keep NaN; min and max may not.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
    return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up


@entry_kernel
@triton.jit
def _gated_activation(x, out, stride_x, N, BLOCK: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = columns < N
    gate = tl.load(x + row * stride_x + columns, mask=used, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_x + N + columns, mask=used, other=0.0).to(tl.float32)
    tl.store(
        out + row * N + columns, gated(gate, up, KIND).to(out.dtype.element_ty), mask=used, eviction_policy=EVICT_LAST
    )


def _fake(x: torch.Tensor, activation: str, overlap: bool = False) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@custom_op("gated_activation", _fake)
def gated_activation(x: torch.Tensor, activation: str, overlap: bool = False) -> torch.Tensor:
    """See :mod:`atom_core.kernels.gated_activation`; ``overlap``: see :func:`triton_support.overlaps`."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, size)
    if num_rows:
        grid = (num_rows, cdiv(size, _BLOCK))
        choice = {"BLOCK": _BLOCK, "KIND": ACTIVATIONS[activation], "OVERLAP": overlap, "num_warps": 4}
        _gated_activation[grid](x, out, x.stride(0), size, **choice, **launch_options(overlap))
    return out
