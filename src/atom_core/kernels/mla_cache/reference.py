"""The latent's norm, rope and the cache write in plain torch: the definition. Float32 arithmetic, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import as_bytes, quantize

if TYPE_CHECKING:
    from atom_core.kernels.mla_cache import MlaSpec, MlaWeights


def mla_cache(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    weights: MlaWeights,
    cache: LatentCacheView,
    slots: torch.Tensor,
    *,
    spec: MlaSpec,
) -> None:
    """See :mod:`atom_core.kernels.mla_cache`."""
    cos_sin = weights.cos_sin[positions]
    rotated = q[..., spec.nope_dim :]
    rotated.copy_(rotate(rotated, cos_sin[:, None], spec.interleaved))
    wide = latent[:, : spec.rank].float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.float()
    key = rotate(latent[:, spec.rank :], cos_sin, spec.interleaved)
    rows = torch.cat((normed.to(spec.dtype), key.to(spec.dtype)), -1)
    has_slot = slots >= 0
    page, offset = slots[has_slot] // cache.page_size, slots[has_slot] % cache.page_size
    as_bytes(cache.rows)[page, offset] = as_bytes(quantize(rows[has_slot], cache.scale, cache.rows.dtype))


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x [..., R]`` rotated by ``cos_sin [..., R]``, float32."""
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    wide = x.float()
    if interleaved:
        even, odd = wide[..., ::2], wide[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
