"""Attention batches and qkv shapes that every kernel must compute correctly, and the expected outputs.

The same cases run on a CPU (the reference; the Triton kernels under Triton's interpreter) and on a GPU. Expected
outputs are computed here one token at a time in float64, from contiguous keys and values without pages.

Everything that a kernel must not read is NaN: unused pages, slots past a request's length, the page that the page table
names past a request's pages, and the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, permutations

import torch

from atom_core.batch import Batch, Pages
from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels.attention import PagedAttentionKernel, PagedAttentionSpec
from atom_core.kernels.attention.reference import ReferenceAttention
from atom_core.kernels.cache_dtypes import FP8_DTYPES, as_bytes
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope_cache import QkNormRopeCacheKernel

NAN = float("nan")

#: Largest |difference| to the float64 answer, as a share of the answer's largest magnitude. Sums are float32: a few
#: units in its last place. The 16-bit types round up to three times, each by half a unit of the largest number (2^-8,
#: 2^-11 of it): q and k after the norm, both partners of a rotation, and the result; in attention, probabilities before
#: the second product, and the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}

#: Scales of an FP8 cache's keys and values in attention: no powers of two, and one below 1, one above.
K_SCALE, V_SCALE = 0.03, 1.7

#: Every order in which a cache may lay out pages (P), heads (H) and tokens (N); a head's numbers are innermost.
STORAGE_ORDERS = tuple("".join(order) for order in permutations("PHN"))


@dataclass(frozen=True)
class AttentionCase:
    """One attention layer and one batch."""

    name: str
    requests: tuple[tuple[int, int], ...]
    """(tokens cached before, new tokens) of each request."""
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    storage: str = "PHN"
    """The layout of plain pages; or "shuffled": a page's keys, then its values."""
    packed: bool = True
    """Keys and values side by side in one tensor, as in vLLM; else two tensors with a gap after each head."""
    padded_requests: int = 0
    padded_tokens: int = 0
    keeps_left: bool = False
    """Whether pages that have left a window keep their numbers: others' kernels may multiply them by zero."""

    def __str__(self) -> str:
        return self.name

    def spec(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> PagedAttentionSpec:
        """What a kernel is built with; no ``cache_dtype`` is ``dtype``."""
        return PagedAttentionSpec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            scale=self.dim**-0.5,
            dtype=dtype,
            cache_dtype=cache_dtype or dtype,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )


@dataclass(frozen=True)
class AttentionBatch:
    """A case's tensors, and the answer."""

    q: torch.Tensor
    cache: KVCacheView
    batch: Batch
    sinks: torch.Tensor | None
    answer: Callable[[], torch.Tensor]
    """Reads nothing that a kernel writes to."""

    @cached_property
    def expected(self) -> torch.Tensor:
        """float64 ``[tokens without padding, H, D]``; unused if a kernel is only compiled."""
        return self.answer()


_MIXED = ((9, 1), (0, 5), (20, 1), (7, 6))

ATTENTION_CASES = (
    AttentionCase("prefill", ((0, 7), (0, 1), (0, 19))),
    AttentionCase("decode", ((0, 1), (15, 1), (16, 1), (40, 1))),
    AttentionCase("decode of several tokens each", ((12, 3), (16, 3), (30, 3))),
    AttentionCase("decode and prefill mixed", _MIXED),
    AttentionCase("prefill in chunks", ((0, 8), (8, 8), (16, 8), (24, 3))),
    AttentionCase("lengths at page borders", ((14, 1), (15, 1), (16, 1), (31, 1), (0, 16), (16, 16), (0, 17))),
    AttentionCase("one key/value head", _MIXED, heads=4, kv_heads=1),
    AttentionCase("a key/value head for each query head", _MIXED, heads=3, kv_heads=3),
    AttentionCase("three query heads a group", _MIXED, heads=6, kv_heads=2),
    AttentionCase("more query heads a group than a tile has rows", ((9, 1), (0, 3)), heads=20, kv_heads=1),
    AttentionCase("one token a page", _MIXED, page_size=1),
    AttentionCase("decoding alone, lengths alike", ((40, 1), (33, 1), (47, 1), (20, 1))),
    AttentionCase("decoding alone, one token a page, a window", ((40, 1), (9, 1), (47, 1)), page_size=1, window=12),
    AttentionCase("64 tokens a page", ((62, 1), (63, 1), (64, 1), (0, 5), (60, 8)), page_size=64),
    AttentionCase("longer than one tile of keys", ((70, 1), (127, 1), (128, 1), (60, 9)), page_size=16),
    AttentionCase("head size 20", _MIXED, dim=20),
    AttentionCase("head size 80", ((9, 1), (0, 5)), dim=80),
    AttentionCase("a window", ((3, 1), (4, 1), (40, 1), (0, 13), (30, 6)), window=5),
    AttentionCase("a window of the query alone", _MIXED, window=1),
    AttentionCase("a window longer than a tile", ((100, 1), (99, 9), (0, 3)), window=70),
    AttentionCase("soft cap", _MIXED, soft_cap=0.7),
    AttentionCase("sinks", _MIXED, sinks=True),
    AttentionCase("sinks, window and soft cap", ((40, 1), (0, 9), (20, 4)), window=6, soft_cap=2.0, sinks=True),
    AttentionCase("padded requests and tokens", _MIXED, padded_requests=3, padded_tokens=4),
    AttentionCase("keys and values apart", _MIXED, packed=False),
    *(AttentionCase(f"cache stored as {order}", _MIXED, storage=order) for order in STORAGE_ORDERS[1:]),
)


def attention_batch(
    case: AttentionCase,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    by_token: bool = True,
    cache_dtype: torch.dtype | None = None,
) -> AttentionBatch:
    """The tensors of ``case``; ``by_token=False`` has the answer from the reference, for batches of many tokens.

    The answer is that to the numbers which are in the cache, where ``cache_dtype`` holds fewer than ``dtype``.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = [before + new for before, new in case.requests]
    keys = [random(length, case.kv_heads, case.dim) for length in lengths]
    values = [random(length, case.kv_heads, case.dim) for length in lengths]
    num_real = sum(new for _, new in case.requests)
    q = random(num_real + case.padded_tokens, case.heads, case.dim)
    q[num_real:] = NAN
    sinks = random(case.heads).bfloat16().float() if case.sinks else None  # exact in every dtype

    k_scale, v_scale = (K_SCALE, V_SCALE) if cache_dtype in FP8_DTYPES else (1.0, 1.0)
    keys, values = ([stored(x, s, cache_dtype or dtype) for x in xs] for xs, s in ((keys, k_scale), (values, v_scale)))
    cache, page_table = _paged(case, keys, values, cache_dtype or dtype, device, generator)
    cache = replace(cache, k_scale=k_scale, v_scale=v_scale)
    keys, values = ([x.double() * s for x in xs] for xs, s in ((keys, k_scale), (values, v_scale)))
    slots = torch.full((q.shape[0],), -1, dtype=torch.int64)
    starts = [0, *accumulate(new for _, new in case.requests)]
    for request, (before, new) in enumerate(case.requests):
        positions = torch.arange(before, before + new)
        pages = page_table[request, positions // case.page_size].long()
        slots[starts[request] : starts[request + 1]] = pages * case.page_size + positions % case.page_size
    starts += [num_real] * case.padded_requests
    lengths += [0] * case.padded_requests
    batch = Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        pages=Pages(page_table.to(device), slots.to(device)),
        num_requests=len(lengths),
        num_tokens=q.shape[0],
        max_query_len=max(new for _, new in case.requests),
        max_seq_len=max(lengths),
    )
    answer = partial(_attention_by_token, case, q, keys, values, sinks)
    inputs = AttentionBatch(q.to(device), cache, batch, None if sinks is None else sinks.to(device), answer)
    if by_token:
        return inputs
    found = _attention_by_reference(case, inputs)  # now, since it reads the cache
    return replace(inputs, answer=lambda: found)


def check_attention(kernel: PagedAttentionKernel, inputs: AttentionBatch) -> None:
    """Run ``kernel`` into a NaN-filled output and compare; padding must stay as it was."""
    out = torch.full_like(inputs.q, NAN)
    kernel(inputs.q, inputs.cache, inputs.batch, inputs.sinks, out)
    num_real = inputs.expected.shape[0]
    assert_close(out[:num_real], inputs.expected)
    assert out[num_real:].isnan().all(), "rows of padding were written"


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x / scale`` as a cache of ``dtype`` holds it."""
    limit = torch.finfo(dtype).max
    return (x.double() / scale).clamp(-limit, limit).to(dtype)


def assert_stored(found: torch.Tensor, expected: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """``found``, of an FP8 cache, is what a number as near to ``expected`` as ``dtype`` allows is stored as."""
    allowed = TOLERANCE[dtype] * expected.abs().max().item()
    low, high = (stored(expected + shift, scale, found.dtype).double() for shift in (-allowed, allowed))
    wide = found.double().cpu()
    assert ((low <= wide) & (wide <= high)).all(), f"{wide} is not between {low} and {high}"  # a NaN fails too


def assert_close(found: torch.Tensor, expected: torch.Tensor, ulps: int = 1) -> None:
    """``found`` is as near to ``expected`` as its dtype allows, or ``ulps`` times that."""
    difference = (found.double().cpu() - expected).abs().max().item()
    allowed = ulps * TOLERANCE[found.dtype] * expected.abs().max().item()
    assert difference <= allowed, f"differs by {difference:.3g}, allowed {allowed:.3g}"  # a NaN fails too


def _attention_by_token(
    case: AttentionCase,
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    group = case.heads // case.kv_heads
    rows = []
    for (before, new), k, v in zip(case.requests, keys, values, strict=True):
        for position in range(before, before + new):
            first = 0 if case.window is None else max(0, position - case.window + 1)
            query = q[len(rows)].double()
            heads = []
            for head in range(case.heads):
                scores = k[first : position + 1, head // group].double() @ query[head] * case.dim**-0.5
                if case.soft_cap is not None:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                weights = scores.exp()
                total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[head].item()))
                heads.append(weights / total @ v[first : position + 1, head // group].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def _attention_by_reference(case: AttentionCase, inputs: AttentionBatch) -> torch.Tensor:
    """The reference's output for the same values in float32."""
    wide = KVCacheView(
        inputs.cache.key.float() * inputs.cache.k_scale, inputs.cache.value.float() * inputs.cache.v_scale
    )
    num_real = sum(new for _, new in case.requests)
    out = torch.empty(inputs.q.shape, dtype=torch.float32, device=inputs.q.device)
    ReferenceAttention(case.spec(torch.float32))(inputs.q.float(), wide, inputs.batch, inputs.sinks, out)
    return out[:num_real].double().cpu()


def _paged(
    case: AttentionCase,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[KVCacheView, torch.Tensor]:
    """The cache with every request's tokens in pages of random order, and the page table. Page 0 is nobody's.

    Shuffled pages are made of plain ones by :func:`shuffled_copy`.

    Past a request's pages the table names pages that there are not. Pages that have left a window are page 0.
    """
    shuffled = case.storage == SHUFFLED
    counts = [-(-len(k) // case.page_size) for k in keys]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    page_table = torch.full((len(keys) + case.padded_requests, max(counts) + 2), 2**30, dtype=torch.int32)
    cache = empty_cache(replace(case, storage="PHN" if shuffled else case.storage), sum(counts) + 1, dtype, device)
    for request, (k, v) in enumerate(zip(keys, values, strict=True)):
        leaves = case.window is not None and not case.keeps_left
        left = max(case.requests[request][0] - case.window + 1, 0) // case.page_size if leaves else 0
        page_table[request, :left] = 0
        for index in range(left, counts[request]):
            page = order.pop()
            page_table[request, index] = page
            begin = index * case.page_size
            count = min(case.page_size, len(k) - begin)
            cache.key[page, :, :count] = k[begin : begin + count].transpose(0, 1).to(device)
            cache.value[page, :, :count] = v[begin : begin + count].transpose(0, 1).to(device)
    return shuffled_copy(cache) if shuffled else cache, page_table


def shuffled_copy(plain: KVCacheView) -> KVCacheView:
    """The same keys and values, each number put where the formulas of :data:`CacheOrder` say."""
    pages, heads, tokens, dim = plain.key.shape
    together = 16 // plain.key.itemsize
    both = torch.empty(pages, 2, heads * tokens * dim, dtype=plain.key.dtype, device=plain.key.device)
    found = KVCacheView.of_shuffled(both[:, 0], both[:, 1], heads, tokens)
    for source, target, keys in ((plain.key, found.key, True), (plain.value, found.value, False)):
        token, number = torch.meshgrid(torch.arange(tokens), torch.arange(dim), indexing="ij")
        at = (number // together, token, number % together) if keys else (token // together, number, token % together)
        as_bytes(target)[(slice(None), slice(None), *at)] = as_bytes(source)
    return replace(found, k_scale=plain.k_scale, v_scale=plain.v_scale)


def empty_cache(case: AttentionCase, num_pages: int, dtype: torch.dtype, device: torch.device) -> KVCacheView:
    """A NaN-filled cache, stored as the case says."""
    sizes = {"P": num_pages, "H": case.kv_heads, "N": case.page_size}
    back = [case.storage.index(letter) for letter in "PHN"]

    def stored(last: int) -> torch.Tensor:
        shape = [sizes[letter] for letter in case.storage]
        return torch.full((*shape, last), NAN, dtype=dtype, device=device).permute(*back, 3)

    if case.packed:
        return KVCacheView.of_packed(stored(2 * case.dim), case.dim)
    return KVCacheView(stored(case.dim + 3)[..., : case.dim], stored(case.dim + 5)[..., : case.dim])


@dataclass(frozen=True)
class QkvCase:
    """A layer's op from raw qkv to queries and a written cache."""

    name: str
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    rotary_dim: int = 16
    interleaved: bool = False
    qk_norm: bool = False
    float32_norms: bool = False
    page_size: int = 16
    storage: str = "PHN"
    packed: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0
    tokens: int = 7

    def __str__(self) -> str:
        return self.name

    def spec(self, dtype: torch.dtype) -> QkvSpec:
        """What a kernel is built with."""
        return QkvSpec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            qk_norm=self.qk_norm,
            dtype=dtype,
            float32_norms=self.float32_norms and dtype != torch.float32,
        )


QKV_CASES = (
    QkvCase("neox"),
    QkvCase("interleaved", interleaved=True),
    QkvCase("q/k norm", qk_norm=True),
    QkvCase("q/k norm in float32", rotary_dim=8, qk_norm=True, float32_norms=True),
    QkvCase("q/k norm, interleaved", qk_norm=True, interleaved=True),
    QkvCase("half of a head rotated", rotary_dim=8, qk_norm=True),
    QkvCase("half of a head rotated, interleaved", rotary_dim=8, interleaved=True),
    QkvCase("head size 20", dim=20, rotary_dim=20, qk_norm=True),
    QkvCase("head size 80, 32 rotated", dim=80, rotary_dim=32, qk_norm=True),
    QkvCase("one key/value head", kv_heads=1),
    QkvCase("a key/value head for each query head", heads=3, kv_heads=3),
    QkvCase("one token a page", page_size=1, qk_norm=True),
    QkvCase("keys and values apart", packed=False),
    *(QkvCase(f"cache stored as {order}", storage=order) for order in STORAGE_ORDERS[1:]),
)

#: What an FP8 cache must hold besides: the largest number where a quotient is beyond it, and few digits of small ones.
FP8_QKV_CASES = (
    *QKV_CASES,
    QkvCase("scales", k_scale=0.5, v_scale=4.0),
    QkvCase("quotients beyond the largest number", k_scale=1e-5, v_scale=3e-6, qk_norm=True),
    QkvCase("quotients of few digits or none", k_scale=500.0, v_scale=2e4),
)

#: The same into shuffled pages.
SHUFFLED_QKV_CASES = (
    QkvCase("shuffled", dim=32, rotary_dim=32, storage=SHUFFLED),
    QkvCase("shuffled, interleaved, one key/value head", kv_heads=1, interleaved=True, storage=SHUFFLED),
    QkvCase(
        "shuffled, half of a head rotated, 32 tokens a page", dim=64, rotary_dim=32, page_size=32, storage=SHUFFLED
    ),
    QkvCase("shuffled, q/k norm, scales", dim=64, rotary_dim=64, qk_norm=True, storage=SHUFFLED),
)

_MAX_POSITION = 50


def check_qkv(
    case: QkvCase,
    kernel: QkNormRopeCacheKernel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    padded: bool = True,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Run ``kernel`` over tokens of which some have no slot, if ``padded``; slots that are nobody's must stay NaN."""
    generator = torch.Generator().manual_seed(0)
    num_pages = 3 + case.tokens // case.page_size
    layout = AttentionCase(
        case.name,
        (),
        kv_heads=case.kv_heads,
        dim=case.dim,
        page_size=case.page_size,
        storage="PHN" if case.storage == SHUFFLED else case.storage,
        packed=case.packed,
    )
    cache = empty_cache(layout, num_pages * max(1, 16 // case.page_size), cache_dtype or dtype, device)
    if case.storage == SHUFFLED:
        cache = shuffled_copy(cache)
    cache = replace(cache, k_scale=case.k_scale, v_scale=case.v_scale)
    num_slots = cache.key.shape[0] * case.page_size

    # The rows of qkv have a gap between them, as a slice of a wider buffer has.
    width = (case.heads + 2 * case.kv_heads) * case.dim
    qkv = torch.randn(case.tokens, width + 8, generator=generator).to(dtype)[:, :width]
    positions = torch.randint(_MAX_POSITION, (case.tokens,), generator=generator)
    angles = torch.rand(_MAX_POSITION, case.rotary_dim // 2, generator=generator) * 6.28
    norm_dtype = torch.float32 if case.float32_norms else dtype
    weights = [torch.rand(case.dim, generator=generator).to(norm_dtype) + 0.5 for _ in range(2)] if case.qk_norm else []
    slots = torch.randperm(num_slots, generator=generator)[: case.tokens]
    if padded:
        slots[case.tokens // 2] = -1
        slots[-1] = -1

    on_device = QkvWeights(
        torch.cat((angles.cos(), angles.sin()), -1).to(device), *(w.to(device) for w in weights), eps=1e-6
    )
    q = kernel(qkv.to(device), positions.to(device), on_device, cache, slots.to(device))

    expected_q, expected_k, expected_v = _qkv_by_head(case, qkv, positions, angles, weights)
    assert_close(q, expected_q)
    cache = cache.as_plain()
    written = torch.zeros(cache.key.shape[0], case.page_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, case.page_size)
            written[page, offset] = True
            for side, expected, scale in (
                (cache.key, expected_k[token], cache.k_scale),
                (cache.value, expected_v[token], cache.v_scale),
            ):
                if side.dtype in FP8_DTYPES:
                    assert_stored(side[page, :, offset], expected, scale, dtype)
                else:
                    assert_close(side[page, :, offset], expected / scale)
    for side in (cache.key, cache.value):
        untouched = side.transpose(1, 2).float().cpu()[~written]
        assert untouched.isnan().all(), "a slot of nobody was written"


def _qkv_by_head(
    case: QkvCase, qkv: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64, by the definition of rotation as a product of complex numbers."""
    heads = qkv.unflatten(-1, (-1, case.dim)).double()
    q, k, v = heads.split((case.heads, case.kv_heads, case.kv_heads), 1)
    turned = []
    for x, weight in zip((q, k), weights or (None, None), strict=True):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        rotated, rest = x[..., : case.rotary_dim], x[..., case.rotary_dim :]
        pairs = rotated.unflatten(-1, (-1, 2)) if case.interleaved else rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
        turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[positions][:, None]
        result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        result = result if case.interleaved else result.transpose(-1, -2)
        turned.append(torch.cat((result.flatten(-2), rest), -1))
    return turned[0], turned[1], v
