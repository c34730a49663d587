"""q/k norm, rope and the cache write in plain torch: the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels.cache_dtypes import as_bytes, quantize
from atom_core.kernels.qk_norm_rope.reference import qk_norm_rope

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
    """See :mod:`atom_core.kernels.qk_norm_rope_cache`."""
    q, k, v = qk_norm_rope(qkv, positions, weights, spec=spec)
    write_cache(k, v, cache, slots)
    return q


def write_cache(k: torch.Tensor, v: torch.Tensor, cache: KVCacheView, slots: torch.Tensor) -> None:
    """Write ``k``, ``v`` ``[T, K, D]`` to ``slots [T]``; negative slots are skipped."""
    has_slot = slots >= 0
    page, offset = slots[has_slot] // cache.page_size, slots[has_slot] % cache.page_size
    if cache.order == SHUFFLED:
        together = cache.key.shape[-1]
        keys = as_bytes(quantize(k[has_slot], cache.k_scale, cache.key.dtype))
        values = as_bytes(quantize(v[has_slot], cache.v_scale, cache.value.dtype))
        as_bytes(cache.key)[page, :, :, offset] = keys.view(*keys.shape[:2], -1, together)
        as_bytes(cache.value)[page, :, offset // together, :, offset % together] = values
        return
    for rows, side, scale in ((k, cache.key, cache.k_scale), (v, cache.value, cache.v_scale)):
        as_bytes(side)[page, :, offset] = as_bytes(quantize(rows[has_slot], scale, side.dtype))
