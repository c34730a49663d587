"""The latent's norm, rope and the cache write in Triton, with the rope of all queries: one launch.

For each token, one program norms the latent, rotates the key next to it and writes the row; others rotate some heads'
queries in place. Interleaved pairs are loaded as one tile, others as two. Padded tokens (negative slots) get rotated
queries, and write nothing to the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.batch import BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.qk_norm_rope_cache.triton_kernel import stored
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.mla_cache import MlaSpec, MlaWeights

#: Heads that a program rotates: few for latency, more if the tokens fill a GPU.
_FEW_HEADS, _MANY_HEADS, _MANY_TOKENS = 16, 64, 64


@triton.jit
def angles_of(
    cos_sin,
    positions,
    token,
    taken,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Cosines and sines ``[T, PAIRS]`` of ``token [T]`` where ``taken``, and each pair's elements ``[1, PAIRS]``."""
    half: tl.constexpr = R // 2
    pair = tl.arange(0, PAIRS)[None, :]
    paired = pair < half
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + half
    known = taken[:, None] & paired
    angles = cos_sin + tl.load(positions + token, mask=taken, other=0).to(tl.int64)[:, None] * R
    cos = tl.load(angles + pair, mask=known, other=1.0)
    sin = tl.load(angles + half + pair, mask=known, other=0.0)
    return cos, sin, first, second, paired


@triton.jit
def rotate(
    source,
    target,
    cos,
    sin,
    first,
    second,
    paired,
    taken,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the elements ``first`` and ``second`` of the rows at ``source [ROWS, 1]``, and write them to ``target``.

    ``cos`` and ``sin`` are ``[1 or ROWS, PAIRS]``. The masks are ``paired`` for pairs and ``taken`` for rows.
    """
    if INTERLEAVED and R == 2 * PAIRS:
        column = tl.arange(0, R)[None, :]
        both = tl.load(source + column, mask=taken[:, None], other=0.0).to(tl.float32)
        x, y = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
        rotated = tl.reshape(tl.join(x * cos - y * sin, y * cos + x * sin), (ROWS, R))
        tl.store(target + column, rotated.to(target.dtype.element_ty), mask=taken[:, None])
    else:
        used = taken[:, None] & paired
        x = tl.load(source + first, mask=used, other=0.0).to(tl.float32)
        y = tl.load(source + second, mask=used, other=0.0).to(tl.float32)
        tl.store(target + first, (x * cos - y * sin).to(target.dtype.element_ty), mask=used)
        tl.store(target + second, (y * cos + x * sin).to(target.dtype.element_ty), mask=used)


@triton.jit
def write_rows(
    latent,
    positions,
    slots,
    cos_sin,
    norm,
    rows,
    token,
    taken,
    eps,
    scale,
    stride_latent,
    stride_page,
    stride_row,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Norm the latents of ``token [T]`` where ``taken``, rotate their keys, and write the rows that have a slot."""
    slot = tl.load(slots + token, mask=taken, other=-1)
    has_slot = slot >= 0
    slot = tl.where(has_slot, slot, 0)
    column = tl.arange(0, L_PADDED)[None, :]
    inside = has_slot[:, None] & (column < L)
    raw = latent + token[:, None] * stride_latent
    row = rows + ((slot // PAGE) * stride_page + (slot % PAGE) * stride_row)[:, None]
    # Values are rounded to the model's dtype first, as attention without a cache would see them.
    values = tl.load(raw + column, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / L + eps)
    normed = wide * factor[:, None] * tl.load(norm + column, mask=column < L, other=0.0).to(tl.float32)
    cached = stored(normed.to(values.dtype).to(tl.float32), scale, LIMIT)
    tl.store(row + column, cached.to(rows.dtype.element_ty), mask=inside)
    cos, sin, first, second, paired = angles_of(cos_sin, positions, token, has_slot, R, PAIRS, INTERLEAVED)
    used = has_slot[:, None] & paired
    key_x = tl.load(raw + L + first, mask=used, other=0.0).to(tl.float32)
    key_y = tl.load(raw + L + second, mask=used, other=0.0).to(tl.float32)
    stored_x = stored((key_x * cos - key_y * sin).to(values.dtype).to(tl.float32), scale, LIMIT)
    stored_y = stored((key_y * cos + key_x * sin).to(values.dtype).to(tl.float32), scale, LIMIT)
    tl.store(row + L + first, stored_x.to(rows.dtype.element_ty), mask=used)
    tl.store(row + L + second, stored_y.to(rows.dtype.element_ty), mask=used)


@entry_kernel
@triton.jit
def _mla_cache(
    q,
    latent,
    positions,
    slots,
    cos_sin,
    norm,
    rows,
    eps,
    scale,
    stride_q_token,
    stride_q_head,
    stride_latent,
    stride_page,
    stride_row,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    taken = tl.full([1], True, tl.int1)
    block = tl.program_id(1)
    if block == 0:
        write_rows(
            latent,
            positions,
            slots,
            cos_sin,
            norm,
            rows,
            token,
            taken,
            eps,
            scale,
            stride_latent,
            stride_page,
            stride_row,
            PAGE,
            R,
            L,
            L_PADDED,
            PAIRS,
            INTERLEAVED,
            LIMIT,
        )
        return

    cos, sin, first, second, paired = angles_of(cos_sin, positions, token, taken, R, PAIRS, INTERLEAVED)
    head = (block - 1) * HEADS + tl.arange(0, HEADS)
    query = q + tl.program_id(0).to(tl.int64) * stride_q_token + head.to(tl.int64)[:, None] * stride_q_head + N
    rotate(query, query, cos, sin, first, second, paired, head < H, R, HEADS, PAIRS, INTERLEAVED)


class TritonMlaCache:
    """See :mod:`atom_core.kernels.mla_cache`; ``overlap``: see :func:`triton_support.overlaps`."""

    def __init__(self, spec: MlaSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        yield _heads(shape.num_tokens, self.spec)

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
    ) -> None:
        """Launch it."""
        mla_cache(q, latent, positions, weights, cache, slots, spec=self.spec, overlap=self.overlap)


def _heads(num_tokens: int, spec: MlaSpec) -> int:
    """Heads of a program."""
    most = _FEW_HEADS if num_tokens < _MANY_TOKENS else _MANY_HEADS
    return int(min(next_power_of_2(spec.num_heads), most))


def mla_cache(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    weights: MlaWeights,
    cache: LatentCacheView,
    slots: torch.Tensor,
    *,
    spec: MlaSpec,
    overlap: bool = False,
) -> None:
    """See :mod:`atom_core.kernels.mla_cache`; ``overlap``: see :func:`triton_support.overlaps`."""
    assert q.stride(-1) == latent.stride(-1) == cache.rows.stride(-1) == 1
    num_tokens = q.shape[0]
    heads = _heads(num_tokens, spec)
    _mla_cache[num_tokens, 1 + cdiv(spec.num_heads, heads)](
        q,
        latent,
        positions,
        slots,
        weights.cos_sin,
        weights.norm,
        cache.rows,
        weights.eps,
        cache.scale,
        *q.stride()[:2],
        latent.stride(0),
        *cache.rows.stride()[:2],
        PAGE=cache.page_size,
        H=spec.num_heads,
        N=spec.nope_dim,
        R=spec.rope_dim,
        L=spec.rank,
        L_PADDED=next_power_of_2(spec.rank),
        PAIRS=next_power_of_2(spec.rope_dim // 2),
        HEADS=heads,
        INTERLEAVED=spec.interleaved,
        LIMIT=saturation_limit(cache.rows.dtype),
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
