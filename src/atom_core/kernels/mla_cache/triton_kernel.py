"""The latent's norm, rope and the cache write in Triton, with the rope of all queries: one launch.

Of a token, one program norms the latent, rotates the key beside it and writes the row; others rotate some heads'
queries in place. Partners that lie side by side are loaded as one tile, several to a word, others as two tiles of their
own. Padded tokens (negative slots) get their queries rotated, and write nothing to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.qk_norm_rope_cache.triton_kernel import stored
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.mla_cache import MlaSpec, MlaWeights

#: Heads that a program rotates: few where latency counts, more where there are tokens enough to fill a GPU.
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
    """Of ``token [T]``, where ``taken``: cosines and sines ``[T, PAIRS]``; which numbers, ``[1, PAIRS]``, they turn."""
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
def turn(
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
    """Rotate the numbers ``first`` and ``second`` behind ``source [ROWS, 1]`` to those behind ``target``.

    ``cos`` and ``sin`` are ``[1 or ROWS, PAIRS]``, of the pairs where ``paired``; rows are those where ``taken``.
    """
    if INTERLEAVED and R == 2 * PAIRS:
        number = tl.arange(0, R)[None, :]
        both = tl.load(source + number, mask=taken[:, None], other=0.0).to(tl.float32)
        x, y = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
        turned = tl.reshape(tl.join(x * cos - y * sin, y * cos + x * sin), (ROWS, R))
        tl.store(target + number, turned.to(target.dtype.element_ty), mask=taken[:, None])
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
    """Norm the latents of ``token [T]``, where ``taken``, rotate the keys beside them, and write those with a slot."""
    slot = tl.load(slots + token, mask=taken, other=-1)
    kept = slot >= 0
    slot = tl.where(kept, slot, 0)
    column = tl.arange(0, L_PADDED)[None, :]
    inside = kept[:, None] & (column < L)
    raw = latent + token[:, None] * stride_latent
    row = rows + ((slot // PAGE) * stride_page + (slot % PAGE) * stride_row)[:, None]
    # Numbers go through the model's dtype first: what attention would see of an uncached row.
    values = tl.load(raw + column, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / L + eps)
    normed = wide * factor[:, None] * tl.load(norm + column, mask=column < L, other=0.0).to(tl.float32)
    numbers = stored(normed.to(values.dtype).to(tl.float32), scale, LIMIT)
    tl.store(row + column, numbers.to(rows.dtype.element_ty), mask=inside)
    cos, sin, first, second, paired = angles_of(cos_sin, positions, token, kept, R, PAIRS, INTERLEAVED)
    used = kept[:, None] & paired
    key_x = tl.load(raw + L + first, mask=used, other=0.0).to(tl.float32)
    key_y = tl.load(raw + L + second, mask=used, other=0.0).to(tl.float32)
    kept_x = stored((key_x * cos - key_y * sin).to(values.dtype).to(tl.float32), scale, LIMIT)
    kept_y = stored((key_y * cos + key_x * sin).to(values.dtype).to(tl.float32), scale, LIMIT)
    tl.store(row + L + first, kept_x.to(rows.dtype.element_ty), mask=used)
    tl.store(row + L + second, kept_y.to(rows.dtype.element_ty), mask=used)


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
    turn(query, query, cos, sin, first, second, paired, head < H, R, HEADS, PAIRS, INTERLEAVED)


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
    heads = min(triton.next_power_of_2(spec.num_heads), _FEW_HEADS if num_tokens < _MANY_TOKENS else _MANY_HEADS)
    _mla_cache[num_tokens, 1 + triton.cdiv(spec.num_heads, heads)](
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
        L_PADDED=triton.next_power_of_2(spec.rank),
        PAIRS=triton.next_power_of_2(spec.rope_dim // 2),
        HEADS=heads,
        INTERLEAVED=spec.interleaved,
        LIMIT=saturation_limit(cache.rows.dtype),
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
