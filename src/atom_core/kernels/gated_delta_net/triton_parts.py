"""What the Triton kernels of Gated DeltaNet share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.gated_delta_net.reference import L2_EPS as _L2_EPS
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights

if TYPE_CHECKING:
    from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec

L2_EPS = tl.constexpr(_L2_EPS)


def assert_layout(
    spec: GatedDeltaNetSpec,
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    weights: GatedDeltaNetWeights,
    recurrent: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """What lies together, as the kernels are given no strides for it; see :mod:`atom_core.kernels.gated_delta_net`."""
    assert qkvz.stride(-1) == ba.stride(-1) == 1
    assert out.stride()[1:] == (spec.value_dim, 1)
    assert recurrent.stride()[1:] == (spec.value_dim * spec.key_dim, spec.key_dim, 1)
    assert all(it.is_contiguous() for it in (weights.conv, weights.a_log, weights.dt_bias, weights.norm))


@triton.jit
def silu(x):
    """``x * sigmoid(x)``, float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def normed(x):
    """A vector over its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + L2_EPS)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Log decay and beta, float32."""
    x = a + dt_bias
    power = tl.exp(tl.minimum(x, 20.0))
    above_one = 1.0 + power
    # log(1 + power), exact for small powers too: what 1 + power has lost, the fraction gives back.
    soft = tl.where(above_one == 1.0, power, tl.log(above_one) * (power / (above_one - 1.0)))
    return -tl.exp(a_log) * tl.where(x > 20.0, x, soft), 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def own_slot(slots, seq_len, block_size, request, stride_slots):
    """Where a request's own slot is; behind it are those for drafts."""
    at = slots + request * stride_slots
    if block_size is not None:
        at += tl.maximum(seq_len - 1, 0) // block_size
    return at


@triton.jit
def located(slots, seq_lens, num_accepted, block_size, request, tokens, stride_slots):
    """A request's own slot, the slot that has its state, 1 if it has one, and the row of its first input.

    The last value is where the slots are. ``tokens``: the new ones.
    """
    seq_len = tl.load(seq_lens + request)
    at = own_slot(slots, seq_len, block_size, request, stride_slots)
    slot = tl.load(at).to(tl.int64)
    has = (seq_len > tokens).to(tl.int32)
    first = 0
    source = slot
    if num_accepted is not None:
        first = tl.maximum(tl.load(num_accepted + request) - 1, 0)  # a padded row may say that none was
        source = tl.load(at + first).to(tl.int64)
    return slot, source, has, first, at


@triton.jit
def seen(
    conv, x, index, channel, known, used, tokens, stride_x, stride_row, stride_channel, W: tl.constexpr
):  # fmt: skip
    """Inputs of some channels, float32 ``[rows, channels]``: ``index`` counts from the first that is in the cache.

    ``conv``, ``x``: rows of the first input in the cache and of the first new token; channels below ``known`` have
    inputs in the cache, those below ``used`` are there.
    """
    row = index[:, None]
    cached = tl.load(
        conv + row * stride_row + channel.to(tl.int64)[None, :] * stride_channel,
        mask=(row < W - 1) & known[None, :],
        other=0.0,
    ).to(tl.float32)
    token = row - (W - 1)
    new = tl.load(
        x + token.to(tl.int64) * stride_x + channel[None, :],
        mask=(token >= 0) & (token < tokens) & used[None, :],
        other=0.0,
    ).to(tl.float32)
    return tl.where(row < W - 1, cached, new)
