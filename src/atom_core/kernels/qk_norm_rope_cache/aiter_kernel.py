"""q/k norm, rope and the cache write by aiter, with cosines and sines in the model's dtype.

aiter reads the scales of an FP8 cache on the host, so they are CPU tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from atom_core.batch import capturing
from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvWeights
    from atom_core.kernels.qk_norm_rope_cache import QkvCacheSpec

#: Rope tables in the model's dtype, by table and dtype: the layers of a model share one.
_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _table(cos_sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    by_dtype: dict[torch.dtype, torch.Tensor] = _TABLES.setdefault(cos_sin, {})  # type: ignore[no-untyped-call]
    if dtype not in by_dtype:
        # A tensor that is made during a capture belongs to that graph.
        assert not capturing(cos_sin.device), "warm up before capturing"
        by_dtype[dtype] = cos_sin.to(dtype).contiguous()
    return by_dtype[dtype]


class AiterFillCache:
    """See :class:`atom_core.kernels.qk_norm_rope_cache.QkNormRopeCacheKernel`."""

    def __init__(self, spec: QkvCacheSpec) -> None:
        require("aiter.fused_qk_norm_rope_cache_pts_quant_shuffle")
        self.spec = spec

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Fill the cache and return q ``[T, H, D]``."""
        cache.expect(self.spec.order, self.spec.cache_dtype)
        assert cache.page_size & (cache.page_size - 1) == 0, "aiter's kernel has pages of a power of two"
        assert weights.q_norm is not None
        assert weights.k_norm is not None
        shuffled, shape = self.spec.order == SHUFFLED, self.spec.qkv
        key, value = cache.key, cache.value
        if not shuffled:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        q: torch.Tensor = _fill_cache(
            qkv.contiguous(),
            weights.q_norm,
            weights.k_norm,
            _table(weights.cos_sin, qkv.dtype),
            positions.long(),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            not shape.interleaved,
            weights.eps,
            key,
            value,
            slots,
            cache.k_scale,
            cache.v_scale,
            shuffled,
            cache.page_size,
            shape.rotary_dim,
        )
        return q


@custom_op(
    "aiter_fill_cache",
    lambda qkv, *others: qkv.new_empty(qkv.shape[0], others[4], others[6]),
    mutates=("key", "value"),
)
def _fill_cache(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    halves: bool,
    eps: float,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    shuffled: bool,
    page_size: int,
    rotary_dim: int,
) -> torch.Tensor:
    tokens = qkv.shape[0]
    q = qkv.new_empty(tokens, num_heads, head_dim)
    if tokens:
        aiter_function("aiter.fused_qk_norm_rope_cache_pts_quant_shuffle")(
            qkv,
            q_norm,
            k_norm,
            cos_sin,
            positions,
            tokens,
            num_heads,
            num_kv_heads,
            num_kv_heads,
            head_dim,
            halves,
            eps,
            q,
            key,
            value,
            slots,
            torch.tensor([k_scale]),
            torch.tensor([v_scale]),
            None,
            None,
            False,
            shuffled,
            page_size,
            16 // key.itemsize,
            rotary_dim,
        )
    return q
