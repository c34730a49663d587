"""q/k norm, rope and the cache write in the torch ops that are fastest on a CPU: q and k together, whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.cache import KVCacheView
from atom_core.kernels.cache_dtypes import FP8_DTYPES, as_bytes, quantize
from atom_core.kernels.qk_norm_rope_cache.reference import write_cache
from atom_core.kernels.rms_norm.cpu import inverse_rms

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    weights: QkvWeights,
    cache: KVCacheView,
    slots: torch.Tensor,
    *,
    spec: QkvSpec,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.qk_norm_rope_cache`; float32 arithmetic, rounded where the reference rounds."""
    heads = qkv.view(qkv.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    num_rotated = spec.num_heads + spec.num_kv_heads
    wide = heads[:, :num_rotated].to(torch.float32, copy=True)
    if weights.q_norm is not None and weights.k_norm is not None:
        wide.mul_(inverse_rms(wide, weights.eps))
        wide[:, : spec.num_heads].mul_(weights.q_norm.float())
        wide[:, spec.num_heads :].mul_(weights.k_norm.float())
        wide = wide.to(spec.dtype).float()  # the model's norm rounds before rope
    qk = _rotate(wide, weights.cos_sin.index_select(0, positions), spec.interleaved).to(spec.dtype)
    q, k, v = qk[:, : spec.num_heads], qk[:, spec.num_heads :], heads[:, num_rotated:]
    if bool((slots < 0).any()):
        write_cache(k, v, cache, slots)
    else:
        _write_rows(quantize(k, cache.k_scale, cache.key.dtype), cache.key, slots)
        _write_rows(quantize(v, cache.v_scale, cache.value.dtype), cache.value, slots)
    return q


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x [T, heads, D]`` with the first ``R`` elements of each head rotated by ``cos_sin [T, R]``."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None].float().chunk(2, dim=-1)
    rotated = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    result = torch.empty_like(x)
    target = result[..., :rotary_dim]
    left, right = (target[..., ::2], target[..., 1::2]) if interleaved else target.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    if rotary_dim < x.shape[-1]:
        result[..., rotary_dim:] = x[..., rotary_dim:]
    return result


def _write_rows(rows: torch.Tensor, side: torch.Tensor, slots: torch.Tensor) -> None:
    """``rows [T, K, D]`` to their slots in ``side [pages, K, page size, D]``."""
    if side.dtype in FP8_DTYPES:
        rows, side = as_bytes(rows), as_bytes(side)
    by_token = side.transpose(1, 2)
    if by_token.stride(0) == by_token.stride(1) * by_token.shape[1]:
        by_token.flatten(0, 1).index_copy_(0, slots, rows)
    else:
        by_token[slots // by_token.shape[1], slots % by_token.shape[1]] = rows
