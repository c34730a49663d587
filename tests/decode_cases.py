"""Batches of one new token a request that the fused decoding attention must get right, beside the ops it is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from atom_core.kernels.attention.reference import ReferenceAttention
from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.kernels.decode_attention import DecodeAttentionKernel, DecodeAttentionSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope.reference import qk_norm_rope
from atom_core.types import SameStepReads
from tests.kernel_cases import NAN, AttentionCase, assert_close, assert_stored, attention_batch


@dataclass(frozen=True)
class DecodeCase:
    """A batch that decodes, and how its q and k are transformed."""

    attention: AttentionCase
    rotary_dim: int | None = None
    """None: the whole head."""
    interleaved: bool = False
    qk_norm: bool = True
    float32_norms: bool = False
    readers: tuple[tuple[int, int], ...] = ()
    """Requests, each with the one whose cached and new tokens it has among its cached ones, in the same pages."""
    reads: SameStepReads = "at page starts"

    def __str__(self) -> str:
        return self.attention.name

    def spec(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> DecodeAttentionSpec:
        """What a kernel is built with."""
        layer = self.attention
        qkv = QkvSpec(
            num_heads=layer.heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.dim,
            rotary_dim=self.rotary_dim or layer.dim,
            interleaved=self.interleaved,
            qk_norm=self.qk_norm,
            dtype=dtype,
            float32_norms=self.float32_norms and dtype != torch.float32,
        )
        return DecodeAttentionSpec(qkv, layer.spec(dtype, cache_dtype), (), self.reads)


def decoding(*cached: int) -> tuple[tuple[int, int], ...]:
    """Requests of one new token behind so many cached ones."""
    return tuple((before, 1) for before in cached)


_SOME = decoding(0, 9, 15, 16, 40)
DECODE_CASES = (
    DecodeCase(AttentionCase("some", _SOME)),
    DecodeCase(AttentionCase("no norm", _SOME), qk_norm=False),
    DecodeCase(AttentionCase("float32 norms", _SOME), float32_norms=True),
    DecodeCase(AttentionCase("interleaved", _SOME), interleaved=True),
    DecodeCase(AttentionCase("partial", _SOME, dim=32), rotary_dim=16),
    DecodeCase(AttentionCase("partial and interleaved", _SOME, dim=48), rotary_dim=32, interleaved=True),
    DecodeCase(AttentionCase("head size 20", _SOME, dim=20)),
    DecodeCase(AttentionCase("head size 80, a part of it rotated", _SOME, dim=80), rotary_dim=20),
    DecodeCase(AttentionCase("head size 80, interleaved", _SOME, dim=80), interleaved=True),
    DecodeCase(AttentionCase("as many heads", _SOME, heads=3, kv_heads=3)),
    DecodeCase(AttentionCase("a group of 16", _SOME, heads=16, kv_heads=1)),
    DecodeCase(AttentionCase("a group of 20", _SOME, heads=20, kv_heads=1)),
    DecodeCase(AttentionCase("one token a page", _SOME, page_size=1)),
    DecodeCase(AttentionCase("64 tokens a page", decoding(62, 63, 64, 0), page_size=64)),
    DecodeCase(AttentionCase("tiles of keys", decoding(63, 64, 65, 127, 128, 129, 200, 300))),
    DecodeCase(AttentionCase("a window", decoding(3, 4, 5, 40, 150), window=5)),
    DecodeCase(AttentionCase("a window of the query alone", _SOME, window=1)),
    DecodeCase(AttentionCase("a window longer than a tile", decoding(69, 70, 71, 200, 300), window=70)),
    DecodeCase(AttentionCase("soft cap", _SOME, soft_cap=0.7)),
    DecodeCase(AttentionCase("sinks", _SOME, sinks=True)),
    DecodeCase(AttentionCase("sinks, window, soft cap", decoding(40, 0, 200), window=6, soft_cap=2.0, sinks=True)),
    DecodeCase(AttentionCase("padded", _SOME, padded_requests=3, padded_tokens=3)),
    DecodeCase(AttentionCase("keys and values apart", _SOME, packed=False)),
    DecodeCase(AttentionCase("token by token in storage", _SOME, storage="PNH")),
)

#: In the order of programs readers come first: one after the other, they find what was in the slot before.
SAME_STEP_READS = (
    DecodeCase(AttentionCase("a page that is filled in the step", decoding(16, 15, 3)), readers=((0, 1),)),
    DecodeCase(AttentionCase("no norm", decoding(16, 15, 3), heads=3, kv_heads=3), qk_norm=False, readers=((0, 1),)),
    DecodeCase(AttentionCase("interleaved", decoding(32, 31)), interleaved=True, readers=((0, 1),)),
    DecodeCase(AttentionCase("partial", decoding(32, 31), dim=48), rotary_dim=20, readers=((0, 1),)),
    DecodeCase(AttentionCase("several readers", decoding(16, 16, 9, 15, 16, 0)), readers=((0, 3), (1, 3), (4, 3))),
    DecodeCase(AttentionCase("two of them", decoding(16, 48, 47, 15)), readers=((0, 3), (1, 2))),
    DecodeCase(AttentionCase("pages behind it", decoding(48, 15, 64, 31)), readers=((0, 1), (2, 3))),
    DecodeCase(AttentionCase("tiles of keys", decoding(64, 63, 128, 127, 320, 319)), readers=((0, 1), (2, 3), (4, 5))),
    DecodeCase(AttentionCase("keys shared out", decoding(640, 639), kv_heads=1), readers=((0, 1),)),
    DecodeCase(AttentionCase("keys shared out, long behind", decoding(640, 143), kv_heads=1), readers=((0, 1),)),
    DecodeCase(AttentionCase("a window", decoding(48, 47, 160, 159), window=5), readers=((0, 1), (2, 3))),
    DecodeCase(AttentionCase("a window of the query alone", decoding(16, 15), window=1), readers=((0, 1),)),
    DecodeCase(AttentionCase("behind a window", decoding(64, 31), window=33), readers=((0, 1),)),
    DecodeCase(AttentionCase("within a window", decoding(64, 31), window=34), readers=((0, 1),)),
    DecodeCase(AttentionCase("sinks, soft cap", decoding(16, 15), soft_cap=0.7, sinks=True), readers=((0, 1),)),
    DecodeCase(AttentionCase("padded", decoding(16, 15), padded_requests=3, padded_tokens=3), readers=((0, 1),)),
    DecodeCase(AttentionCase("64 tokens a page", decoding(64, 63), page_size=64), readers=((0, 1),)),
    DecodeCase(AttentionCase("many requests", decoding(16, *(3,) * 140, 15), kv_heads=1), readers=((0, 141),)),
    DecodeCase(AttentionCase("anywhere", decoding(20, 15)), readers=((0, 1),), reads="anywhere"),
)
LARGE_DECODE = tuple(
    DecodeCase(AttentionCase(f"{name}, {heads}/{kv_heads} heads of {dim}", requests, heads, kv_heads, dim))
    for (name, requests), (heads, kv_heads, dim) in product(
        (
            ("one", decoding(129)),
            ("one long", decoding(4095)),
            ("eight", decoding(0, 1, 500, 1023, 1024, 1025, 2000, 3000)),
            ("64", decoding(*range(0, 64 * 37, 37))),
            ("256", decoding(*range(256))),
        ),
        ((32, 8, 128), (32, 4, 128), (16, 8, 128), (32, 8, 64), (16, 8, 256), (14, 2, 64)),
    )
) + tuple(
    DecodeCase(
        AttentionCase(f"{name}, filled in the step, {heads} heads of {dim}", requests, heads, 8, dim), readers=them
    )
    for (name, requests, them), (heads, dim) in product(
        (
            ("two", decoding(16, 15), ((0, 1),)),
            ("two long", decoding(4096, 4095), ((0, 1),)),
            ("64", decoding(*(64, 63) * 32), tuple((2 * pair, 2 * pair + 1) for pair in range(32))),
            ("256", decoding(*(16,) * 128, *(15,) * 128), tuple((reader, 255) for reader in range(128))),
        ),
        ((32, 128), (64, 64), (16, 256)),
    )
)


def wide(case: DecodeCase, least: int = 64) -> DecodeCase:
    """With heads of ``least`` or more, of which as large a part is rotated, as Hopper's own kernel has them."""
    layer = case.attention
    if layer.dim >= least and layer.dim & (layer.dim - 1) == 0:
        return case
    rotary_dim = case.rotary_dim and case.rotary_dim * least // layer.dim // 2 * 2
    return replace(case, attention=replace(layer, dim=least), rotary_dim=rotary_dim)


def check_decode(
    case: DecodeCase, kernel: DecodeAttentionKernel, spec: DecodeAttentionSpec, device: torch.device
) -> None:
    """Run ``kernel`` into a NaN-filled output over a cache whose new slots are NaN; compare with the references."""
    dtype, cache_dtype = spec.qkv.dtype, spec.attention.cache_dtype
    inputs = attention_batch(case.attention, dtype, device, cache_dtype=cache_dtype)
    batch, cache = inputs.batch, inputs.cache
    for reader, writer in case.readers:
        shared = -(-(case.attention.requests[writer][0] + 1) // cache.page_size)
        batch.pages.table[reader, :shared] = batch.pages.table[writer, :shared]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    layer, num_tokens, num_real = case.attention, inputs.q.shape[0], len(case.attention.requests)
    qkv = random(num_tokens, (layer.heads + 2 * layer.kv_heads) * layer.dim)
    qkv[num_real:] = NAN
    lengths = batch.seq_lens.long()
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions[:num_real] = lengths[:num_real] - 1
    angles = torch.randn(int(lengths.max()), spec.qkv.rotary_dim // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    norms = (random(layer.dim), random(layer.dim)) if case.qk_norm else (None, None)
    if case.float32_norms:
        norms = tuple(norm.float() for norm in norms)
    weights = QkvWeights(cos_sin, *norms, 1e-6)

    real = batch.pages.slots[:num_real]
    page, offset = real // cache.page_size, real % cache.page_size
    for side in (cache.key, cache.value):
        as_bytes(side)[page, :, offset] = 0x7F if side.element_size() == 1 else NAN
    before = cache.key.isnan(), cache.value.isnan()
    q, k, v = qk_norm_rope(qkv[:num_real], positions[:num_real], weights, spec=spec.qkv)

    out = torch.full_like(inputs.q, NAN)
    assert kernel.takes(batch)
    kernel(qkv, positions, weights, cache, batch, inputs.sinks, out)
    for side, scale, wanted in ((cache.key, cache.k_scale, k), (cache.value, cache.v_scale, v)):
        found = side[page, :, offset]
        if side.element_size() == 1:
            assert_stored(found, wanted.double().cpu(), scale, dtype)
        else:
            assert_close(found, wanted.double().cpu())
    for side, was in zip((cache.key, cache.value), before, strict=True):
        was[page, :, offset] = False
        assert torch.equal(side.isnan(), was), "something else was written"
    # The answer to what is in the cache now: the new numbers may be rounded up where the reference rounds down.
    expected = torch.empty(num_real, layer.heads, layer.dim, device=device)
    ReferenceAttention(replace(spec.attention, dtype=torch.float32))(q.float(), cache, batch, inputs.sinks, expected)
    assert_close(out[:num_real], expected.double().cpu())
    assert out[num_real:].isnan().all(), "rows of padding were written"
