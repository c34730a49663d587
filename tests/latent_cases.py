"""Multi-head latent attention (MLA): batches that every kernel must compute correctly, and the expected outputs.

The same cases run on a CPU (the references; the Triton kernels under Triton's interpreter) and on a GPU. Expected
outputs are computed here one token at a time in float64, from contiguous rows without pages. As in
:mod:`tests.kernel_cases`, everything that a kernel must not read is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from atom_core.batch import Batch, HostLengths, Pages
from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.head_linear import HeadLinearKernel
from atom_core.kernels.mla_absorbed_queries import MlaAbsorbedQueriesKernel
from atom_core.kernels.mla_absorbed_values import MlaAbsorbedValuesKernel
from atom_core.kernels.mla_attention import MlaAttentionKernel, MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaCacheKernel, MlaSpec, MlaWeights
from atom_core.kernels.mla_fused_decode import MlaFusedDecodeKernel
from atom_core.kernels.mla_prefill import MlaPrefillKernel
from atom_core.kernels.mla_prefill.plan import plan_prefill
from tests.kernel_cases import NAN, assert_close, assert_stored, stored

#: Of an FP8 cache.
SCALE = 0.03


@dataclass(frozen=True)
class LatentCase:
    """One attention layer over latents and one batch."""

    name: str
    requests: tuple[tuple[int, int], ...]
    """(tokens cached before, new tokens) of each request."""
    heads: int = 4
    rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 16
    value_dim: int = 16
    page_size: int = 16
    interleaved: bool = True
    gap: int = 0
    """Unused elements after each row."""
    padded_requests: int = 0
    padded_tokens: int = 0

    def __str__(self) -> str:
        return self.name

    def spec(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> MlaAttentionSpec:
        """What a kernel is built with; no ``cache_dtype`` is ``dtype``."""
        shape = MlaSpec(
            self.heads,
            self.rank,
            self.nope_dim,
            self.rope_dim,
            self.value_dim,
            self.interleaved,
            dtype,
            cache_dtype or dtype,
        )
        return MlaAttentionSpec(shape, (self.nope_dim + self.rope_dim) ** -0.5)


_MIXED = ((9, 1), (20, 1), (0, 5), (7, 6))

LATENT_CASES = (
    LatentCase("prefill", ((0, 7), (0, 1), (0, 19))),
    LatentCase("decode", ((0, 1), (15, 1), (16, 1), (40, 1))),
    LatentCase("drafts that are verified", ((12, 3), (16, 3), (30, 3))),
    LatentCase("decode and prefill mixed", _MIXED),
    LatentCase("prefill, then decode", _MIXED[::-1]),
    LatentCase("prefill in chunks", ((0, 8), (8, 8), (16, 8), (24, 3))),
    LatentCase("lengths at page borders", ((14, 1), (15, 1), (16, 1), (31, 1), (0, 16), (16, 16), (0, 17))),
    LatentCase("longer than a tile", ((70, 1), (127, 1), (128, 1), (60, 9), (0, 70))),
    LatentCase("long, and few of them", ((300, 1), (513, 1))),
    LatentCase("16 heads", _MIXED, heads=16),
    LatentCase("20 heads", _MIXED, heads=20),
    LatentCase("more heads than a tile has rows", ((9, 1), (0, 3), (70, 2)), heads=96),
    LatentCase("one head", _MIXED, heads=1),
    LatentCase("sizes that are no powers of two", _MIXED, rank=40, nope_dim=12, rope_dim=8, value_dim=20),
    LatentCase("values wider than keys", _MIXED, nope_dim=8, value_dim=24),
    LatentCase("one token a page", _MIXED, page_size=1),
    LatentCase("64 tokens a page", ((62, 1), (63, 1), (64, 1), (0, 5), (60, 8)), page_size=64),
    LatentCase("rows apart", _MIXED, gap=3),
    LatentCase("padded requests and tokens", _MIXED, padded_requests=3, padded_tokens=4),
)


@dataclass(frozen=True)
class LatentBatch:
    """A case's tensors."""

    q: torch.Tensor
    """``[T, H, N + R]``, rotated."""
    folded: torch.Tensor
    """``[T, H, L + R]``: other queries, that meet latents."""
    expand: torch.Tensor
    cache: LatentCacheView
    batch: Batch
    rows: list[torch.Tensor]
    """float64, of each request: what the cache stands for."""

    @property
    def num_real(self) -> int:
        """The number of tokens without padding."""
        return int(self.batch.host.starts[-1])


def latent_batch(
    case: LatentCase, dtype: torch.dtype, device: torch.device, seed: int = 0, cache_dtype: torch.dtype | None = None
) -> LatentBatch:
    """The tensors of ``case``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = [before + new for before, new in case.requests]
    width, num_real = case.rank + case.rope_dim, sum(new for _, new in case.requests)
    scale = SCALE if cache_dtype in FP8_DTYPES else 1.0
    rows = [stored(random(length, width), scale, cache_dtype or dtype) for length in lengths]
    num_tokens, head_dim = num_real + case.padded_tokens, case.nope_dim + case.rope_dim
    q, folded = (random(num_tokens, case.heads, dim) for dim in (head_dim, width))
    q[num_real:] = folded[num_real:] = NAN
    expand = random(case.heads, case.nope_dim + case.value_dim, case.rank) * case.rank**-0.5

    counts = [-(-length // case.page_size) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    page_table = torch.full((len(lengths) + case.padded_requests, max(counts) + 2), 2**30, dtype=torch.int32)
    shape = (sum(counts) + 1, case.page_size, width + case.gap)
    pages = torch.full(shape, NAN, dtype=cache_dtype or dtype, device=device)[..., :width]
    starts = [0, *accumulate(new for _, new in case.requests)]
    slots = torch.full((q.shape[0],), -1, dtype=torch.int64)
    for request, found in enumerate(rows):
        for index in range(counts[request]):
            page = order.pop()
            page_table[request, index] = page
            part = found[index * case.page_size : (index + 1) * case.page_size]
            pages[page, : len(part)] = part.to(device)
        before, new = case.requests[request]
        positions = torch.arange(before, before + new)
        of_token = page_table[request, positions // case.page_size].long()
        slots[starts[request] : starts[request + 1]] = of_token * case.page_size + positions % case.page_size
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
        host=HostLengths(starts, lengths),
    )
    wide = [found.double() * scale for found in rows]
    cache = LatentCacheView(pages, scale)
    return LatentBatch(q.to(device), folded.to(device), expand.to(device), cache, batch, wide)


def _by_token(
    case: LatentCase, inputs: LatentBatch, answer: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``answer`` to each token and the rows that it sees."""
    found = []
    for (before, new), rows in zip(case.requests, inputs.rows, strict=True):
        found += [answer(len(found) + index, rows[: before + index + 1]) for index in range(new)]
    return torch.stack(found)


def check_absorbed(
    case: LatentCase, kernel: MlaAttentionKernel, inputs: LatentBatch, ulps: int = 1, *, fills_padding: bool = False
) -> None:
    """Run ``kernel`` into a NaN-filled output and compare; padding must stay as it was, or may be anything."""
    folded, scale = inputs.folded.double().cpu(), (case.nope_dim + case.rope_dim) ** -0.5
    out = torch.full((*inputs.folded.shape[:2], case.rank), NAN, dtype=inputs.q.dtype, device=inputs.q.device)
    kernel(inputs.folded, inputs.cache, inputs.batch, out)

    def answer(token: int, rows: torch.Tensor) -> torch.Tensor:
        weights = (folded[token] @ rows.T * scale).softmax(-1)
        return weights @ rows[:, : case.rank]

    assert_close(out[: inputs.num_real], _by_token(case, inputs, answer), ulps)
    assert fills_padding or out[inputs.num_real :].isnan().all(), "rows of padding were written"


def check_values(case: LatentCase, kernel: MlaAbsorbedValuesKernel, inputs: LatentBatch, ulps: int = 1) -> None:
    """The same of a kernel that goes on to each head's values, with what lies between tokens and heads NaN."""
    folded, scale = inputs.folded.double().cpu(), (case.nope_dim + case.rope_dim) ** -0.5
    into = inputs.expand[:, case.nope_dim :].transpose(1, 2)
    wide = into.double().cpu()
    shape = (inputs.folded.shape[0], case.heads + 1, case.value_dim + 8)
    room = torch.full(shape, NAN, dtype=inputs.q.dtype, device=inputs.q.device)
    out = room[:, : case.heads, : case.value_dim]
    assert kernel.takes(len(inputs.folded), inputs.cache, inputs.batch)
    kernel(inputs.folded, inputs.cache, inputs.batch, into, out)

    def answer(token: int, rows: torch.Tensor) -> torch.Tensor:
        weights = (folded[token] @ rows.T * scale).softmax(-1)
        return torch.einsum("hl,hlv->hv", weights @ rows[:, : case.rank], wide)

    assert_close(out[: inputs.num_real], _by_token(case, inputs, answer), ulps)
    assert out[inputs.num_real :].isnan().all(), "rows of padding were written"
    assert room[:, case.heads :].isnan().all(), "what is nobody's was written"
    assert room[..., case.value_dim :].isnan().all(), "what is nobody's was written"


def check_expanded(case: LatentCase, kernel: MlaPrefillKernel, inputs: LatentBatch, ulps: int = 1) -> None:
    """Run ``kernel`` on all requests that have tokens, whatever it costs, and compare."""
    queries, expand = inputs.q.double().cpu(), inputs.expand.double().cpu()
    scale = (case.nope_dim + case.rope_dim) ** -0.5
    plan = plan_prefill(inputs.batch, case.spec(inputs.q.dtype).latent)
    assert plan is not None
    assert not plan.absorbed
    out = torch.full((*inputs.q.shape[:2], case.value_dim), NAN, dtype=inputs.q.dtype, device=inputs.q.device)
    kernel(inputs.q, inputs.expand, inputs.cache, inputs.batch, plan, out)

    def answer(token: int, rows: torch.Tensor) -> torch.Tensor:
        latents, turned = rows[:, : case.rank], rows[:, case.rank :]
        expanded = torch.einsum("kl,hdl->hkd", latents, expand)
        keys, values = expanded[..., : case.nope_dim], expanded[..., case.nope_dim :]
        plain, rotated = queries[token, :, : case.nope_dim], queries[token, :, case.nope_dim :]
        scores = torch.einsum("hd,hkd->hk", plain, keys) + rotated @ turned.T
        return torch.einsum("hk,hkd->hd", (scores * scale).softmax(-1), values)

    assert_close(out[: inputs.num_real], _by_token(case, inputs, answer), ulps)
    assert out[inputs.num_real :].isnan().all(), "rows of padding were written"


_MAX_POSITION = 50


def _turned(case: LatentCase, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x [..., R]`` by the definition of rotation as a product of complex numbers; ``angles [..., R / 2]``."""
    pairs = x.unflatten(-1, (-1, 2)) if case.interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    ones = torch.ones_like(angles, dtype=torch.float64)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(ones, angles.double())
    result = torch.view_as_real(turned)
    return (result if case.interleaved else result.transpose(-1, -2)).flatten(-2)


def check_mla_cache(
    case: LatentCase,
    kernel: MlaCacheKernel,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
    tokens: int = 7,
) -> None:
    """Run ``kernel`` on tokens of random slots, two of them padding, over a NaN-filled cache, and compare."""
    generator = torch.Generator().manual_seed(0)
    width = case.rank + case.rope_dim
    num_pages = tokens // case.page_size + 2
    pages = torch.full((num_pages, case.page_size, width + case.gap), NAN, dtype=cache_dtype or dtype, device=device)[
        ..., :width
    ]
    scale = SCALE if cache_dtype in FP8_DTYPES else 1.0
    # Queries and latents are slices of wider buffers, as of a merged product.
    head_dim = case.nope_dim + case.rope_dim
    q = torch.randn(tokens, case.heads * head_dim + 8, generator=generator).to(dtype)[:, : case.heads * head_dim]
    q = q.unflatten(-1, (case.heads, head_dim))
    latent = torch.randn(tokens, width + 8, generator=generator).to(dtype)[:, 8:]
    positions = torch.randint(_MAX_POSITION, (tokens,), generator=generator)
    angles = torch.rand(_MAX_POSITION, case.rope_dim // 2, generator=generator) * 6.28
    norm = torch.rand(case.rank, generator=generator).to(dtype) + 0.5
    slots = torch.randperm(num_pages * case.page_size, generator=generator)[:tokens]
    slots[tokens // 2] = slots[-1] = -1
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    expand = torch.randn(case.heads, case.nope_dim + case.value_dim, case.rank, generator=generator).to(dtype)
    weights = MlaWeights(cos_sin, norm.to(device), 1e-6, expand.to(device))
    found = q.clone().to(device)
    kernel(found, latent.to(device), positions.to(device), weights, LatentCacheView(pages, scale), slots.to(device))

    def turn(x: torch.Tensor) -> torch.Tensor:
        return _turned(case, x, angles[positions][:, None])

    wide = q.double()
    assert torch.equal(found[..., : case.nope_dim].cpu(), q[..., : case.nope_dim]), "what is not rotated has changed"
    assert_close(found[..., case.nope_dim :], turn(wide[..., case.nope_dim :]))
    latents, key = latent.double()[:, : case.rank], turn(latent.double()[:, None, case.rank :])[:, 0]
    normed = latents / (latents.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    expected = torch.cat((normed, key), -1)
    written = torch.zeros(num_pages, case.page_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, case.page_size)
            written[page, offset] = True
            if pages.dtype in FP8_DTYPES:
                assert_stored(pages[page, offset], expected[token], scale, dtype)
            else:
                assert_close(pages[page, offset], expected[token])
    assert pages.float().cpu()[~written].isnan().all(), "a slot of nobody was written"


def check_mla_absorbed_queries(
    case: LatentCase,
    kernel: MlaAbsorbedQueriesKernel,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
    tokens: int = 7,
) -> None:
    """The same of a kernel that leaves ``q`` alone and folds it into queries; these are compared as well."""

    def in_place(
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
    ) -> None:
        before = q.clone()
        # A slice of a wider buffer, as for attention that wants room.
        room = torch.full((tokens, case.heads + 3, case.rank + case.rope_dim), NAN, dtype=dtype, device=device)
        queries = room[:, : case.heads]
        kernel(q, latent, positions, weights, cache, slots, queries)
        assert torch.equal(q, before)
        assert room[:, case.heads :].isnan().all(), "what is nobody's was written"
        plain, into = q[..., : case.nope_dim].double().cpu(), weights.expand[:, : case.nope_dim].double().cpu()
        assert_close(queries[..., : case.rank], torch.einsum("mhn,hnl->mhl", plain, into))
        q[..., case.nope_dim :] = queries[..., case.rank :]

    check_mla_cache(case, in_place, dtype, device, cache_dtype, tokens)


def check_mla_fused_decode(
    case: LatentCase,
    kernel: MlaFusedDecodeKernel,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    max_seq_len: int | None = None,
) -> None:
    """Run ``kernel`` on the only token of the only request, whose row is not in the cache yet, and compare."""
    ((before, _),) = case.requests
    inputs = latent_batch(case, dtype, device, seed)
    batch = replace(inputs.batch, max_seq_len=max_seq_len or before + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    width = case.rank + case.rope_dim
    q = torch.randn(1, case.heads, case.nope_dim + case.rope_dim + 8, generator=generator).to(dtype)[..., :-8]
    latent = torch.randn(1, width + 8, generator=generator).to(dtype)[:, 8:]
    angles = torch.rand(before + 1, case.rope_dim // 2, generator=generator) * 6.28
    norm = torch.rand(case.rank, generator=generator).to(dtype) + 0.5
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    weights = MlaWeights(cos_sin, norm.to(device), 1e-6, inputs.expand)
    page, offset = divmod(int(batch.pages.slots[0]), case.page_size)
    pages = inputs.cache.rows
    pages[page, offset] = NAN
    others = pages.clone()
    room = torch.full((1, case.heads + 1, case.value_dim + 8), NAN, dtype=dtype, device=device)
    given, out = q.to(device), room[:, : case.heads, : case.value_dim]
    assert kernel.takes(1, inputs.cache, batch)
    positions = torch.tensor([before], device=device)
    kernel(given, latent.to(device), positions, weights, inputs.cache, batch.pages.slots, batch, out)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return _turned(case, x, angles[before])

    wide, own = q[0].double(), latent[0].double()
    normed = own[: case.rank] / (own[: case.rank].square().mean() + 1e-6).sqrt() * norm.double()
    own = torch.cat((normed, turn(own[case.rank :])))
    assert_close(pages[page, offset], own)
    pages[page, offset] = NAN
    assert torch.equal(pages.float().nan_to_num(7.0), others.float().nan_to_num(7.0)), "other rows were written"
    assert torch.equal(given.cpu(), q)
    rows = torch.cat((inputs.rows[0][:-1], own[None]))
    expand = inputs.expand.double().cpu()
    folded = torch.einsum("hn,hnl->hl", wide[:, : case.nope_dim], expand[:, : case.nope_dim])
    scores = torch.cat((folded, turn(wide[:, case.nope_dim :])), -1) @ rows.T
    shares = (scores * (case.nope_dim + case.rope_dim) ** -0.5).softmax(-1)
    values = torch.einsum("hl,hvl->hv", shares @ rows[:, : case.rank], expand[:, case.nope_dim :])
    assert_close(out[0], values, ulps=2)
    assert room[:, case.heads :].isnan().all(), "what is nobody's was written"
    assert room[..., case.value_dim :].isnan().all(), "what is nobody's was written"


def check_head_linear(
    kernel: HeadLinearKernel,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool,
) -> None:
    """Run ``kernel`` for (tokens, heads, inputs, outputs, carried) and compare."""
    tokens, heads, inputs, outputs, carried = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, inputs + carried + 3, generator=generator).to(dtype)[..., : inputs + carried]
    weight = torch.randn(heads, outputs, inputs + 5, generator=generator).to(dtype)[..., :inputs].transpose(1, 2)
    if not transposed:
        weight = weight.contiguous()
    out = torch.full((tokens, heads, outputs + carried), NAN, dtype=dtype, device=device)
    on_device = weight.to(device) if not transposed else weight.transpose(1, 2).to(device).transpose(1, 2)
    kernel(x.to(device), on_device, out)
    expected = torch.einsum("thk,hko->tho", x[..., :inputs].double(), weight.double())
    assert_close(out[..., :outputs], expected)
    assert torch.equal(out[..., outputs:].cpu(), x[..., inputs:])
