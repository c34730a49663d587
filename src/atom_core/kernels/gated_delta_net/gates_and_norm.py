"""The gates and the gated norm of Gated DeltaNet in Triton, a launch each, around kernels that have neither."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_delta_net.triton_parts import gates, silu
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, next_power_of_2

_BLOCK = 1024
#: Value heads that a program norms.
_HEADS = 8


@entry_kernel
@triton.jit(do_not_specialize=["total"])
def _gates(ba, a_log, dt_bias, g, beta, stride_ba, total, HV: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    used = at < total
    head = (at % HV).to(tl.int32)
    row = ba + at // HV * stride_ba + head
    b = tl.load(row, mask=used, other=0.0).to(tl.float32)
    a = tl.load(row + HV, mask=used, other=0.0).to(tl.float32)
    log_decay, rate = gates(a, b, tl.load(a_log + head), tl.load(dt_bias + head))
    tl.store(g + at, log_decay, mask=used)
    tl.store(beta + at, rate, mask=used)


@entry_kernel
@triton.jit
def _norm_and_gate(
    x, z, weight, out, eps, stride_z, stride_out,
    HV: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    value = tl.arange(0, BLOCK_V)
    used = (head < HV)[:, None] & (value < V)[None, :]
    at = head[:, None] * V + value[None, :]
    wide = tl.load(x + token * (HV * V) + at, mask=used, other=0.0).to(tl.float32)
    gate = tl.load(z + token * stride_z + at, mask=used, other=0.0).to(tl.float32)
    factor = tl.load(weight + value, mask=value < V, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / V + eps)[:, None] * factor[None, :]
    found = (normed * silu(gate)).to(out.dtype.element_ty)
    tl.store(out + token * stride_out + at, found, mask=used, eviction_policy=EVICT_LAST)


def compute_gates(ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and ``beta``, both float32 ``[T, Hv]``, of ``ba [T, 2 Hv]``, whose rows may be strided."""
    tokens, heads = ba.shape[0], a_log.shape[0]
    assert ba.stride(1) == 1
    g, beta = torch.empty(2, tokens, heads, dtype=torch.float32, device=ba.device)
    total = tokens * heads
    _gates[(cdiv(total, _BLOCK),)](ba, a_log, dt_bias, g, beta, ba.stride(0), total, HV=heads, BLOCK=_BLOCK)
    return g, beta


def norm_and_gate(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Write ``rms_norm(x) * weight * silu(z)``, rounded once, to ``out [T, Hv, V]``.

    ``x``: ``[T, Hv, V]``, contiguous. ``z``: ``[T, Hv V]``; its rows, and those of ``out``, may be strided.
    """
    tokens, heads, size = x.shape
    assert x.is_contiguous()
    assert z.stride(1) == 1
    assert out.stride()[1:] == (size, 1)
    grid = (tokens, cdiv(heads, _HEADS))
    block = next_power_of_2(size)
    _norm_and_gate[grid](
        x, z, weight, out, eps, z.stride(0), out.stride(0), HV=heads, V=size, HEADS=_HEADS, BLOCK_V=block, num_warps=4
    )
