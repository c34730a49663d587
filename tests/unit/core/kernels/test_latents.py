"""Attention over latents, token by token: the references, and the Triton kernels under Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES, is_foreign
from atom_core.kernels.head_linear.reference import head_linear, widened_head_linear
from atom_core.kernels.mla_attention import MLA_ATTENTION
from atom_core.kernels.mla_attention.reference import ReferenceMlaAttention, cached_rows
from atom_core.kernels.mla_cache.reference import mla_cache
from atom_core.kernels.mla_prefill.plan import Piece, cut, expanding_is_cheaper, plan_prefill
from atom_core.kernels.mla_prefill.reference import ReferenceMlaPrefill
from atom_core.kernels.select import Target
from tests.latent_cases import (
    LATENT_CASES,
    LatentCase,
    check_absorbed,
    check_expanded,
    check_head_linear,
    check_mla_absorbed_queries,
    check_mla_cache,
    check_values,
    latent_batch,
)

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", LATENT_CASES, ids=str)
#: Expanded, heads are programs of their own, and 96 of them take the interpreter half a minute.
every_case_expanded = pytest.mark.parametrize("case", [it for it in LATENT_CASES if it.heads <= 20], ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_fp8_dtype = pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
#: What Triton's interpreter multiplies, and for whose GPU.
interpreted = pytest.mark.parametrize(("dtype", "nvidia"), [(torch.float32, False), (torch.float16, True)], ids=str)


@pytest.fixture
def all_expanded(monkeypatch):
    """All requests with tokens have their latents expanded, whatever it costs."""
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.expanding_is_cheaper", lambda new, *_: new > 0)


@every_case
@every_dtype
def test_the_reference_of_the_absorbed_form_answers_as_token_by_token(case, dtype):
    check_absorbed(case, ReferenceMlaAttention(case.spec(dtype)), latent_batch(case, dtype, CPU))


@every_case
@every_dtype
@pytest.mark.usefixtures("all_expanded")
def test_the_reference_of_the_expanded_form_answers_as_token_by_token(case, dtype):
    check_expanded(case, ReferenceMlaPrefill(case.spec(dtype)), latent_batch(case, dtype, CPU))


@every_case
@every_fp8_dtype
@pytest.mark.usefixtures("all_expanded")
def test_the_references_read_an_fp8_cache(case, cache_dtype):
    inputs = latent_batch(case, torch.bfloat16, CPU, cache_dtype=cache_dtype)
    spec = case.spec(torch.bfloat16, cache_dtype)
    check_absorbed(case, ReferenceMlaAttention(spec), inputs)
    check_expanded(case, ReferenceMlaPrefill(spec), inputs)


@every_case
@interpreted
def test_the_triton_kernel_of_the_absorbed_form_answers_as_token_by_token(case, dtype, nvidia):
    from atom_core.kernels.mla_attention.triton_kernel import TritonMlaAttention

    kernel = TritonMlaAttention(case.spec(dtype), nvidia, overlap=False)
    check_absorbed(case, kernel, latent_batch(case, dtype, CPU))


@every_case
@every_fp8_dtype
def test_the_triton_kernel_of_the_absorbed_form_reads_an_fp8_cache(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.mla_attention.triton_kernel import TritonMlaAttention

    foreign = is_foreign(cache_dtype, "gfx942")
    kernel = TritonMlaAttention(case.spec(torch.float16, cache_dtype), False, overlap=False, foreign=foreign)
    check_absorbed(case, kernel, latent_batch(case, torch.float16, CPU, cache_dtype=cache_dtype))


@pytest.fixture(params=[1024, 24])
def keys_per_chunk(request, monkeypatch):
    """How many keys are expanded at a time: all, or so few that requests go on from chunk to chunk."""
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.BUFFER_BYTES", 0)
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.MIN_KEYS", request.param)


@every_case_expanded
@interpreted
@pytest.mark.usefixtures("all_expanded", "keys_per_chunk")
def test_the_triton_kernel_of_the_expanded_form_answers_as_token_by_token(case, dtype, nvidia):
    from atom_core.kernels.mla_prefill.triton_kernel import TritonMlaPrefill

    # Keys and values are rounded once more than those of other attention.
    check_expanded(case, TritonMlaPrefill(case.spec(dtype), nvidia, False), latent_batch(case, dtype, CPU), ulps=2)


@every_case_expanded
@every_fp8_dtype
@pytest.mark.usefixtures("all_expanded")
def test_the_triton_kernel_of_the_expanded_form_reads_an_fp8_cache(case, cache_dtype):
    from atom_core.kernels.mla_prefill.triton_kernel import TritonMlaPrefill

    kernel = TritonMlaPrefill(case.spec(torch.float16, cache_dtype), False, overlap=False)
    check_expanded(case, kernel, latent_batch(case, torch.float16, CPU, cache_dtype=cache_dtype), ulps=2)


#: Shapes of rows; the requests do not matter.
CACHES = (
    LatentCase("interleaved", ()),
    LatentCase("in halves", (), interleaved=False),
    LatentCase("one token a page", (), page_size=1),
    LatentCase("rows apart", (), gap=5),
    LatentCase("20 heads", (), heads=20),
    LatentCase("sizes that are no powers of two", (), rank=40, nope_dim=12, rope_dim=12),
)
every_cache = pytest.mark.parametrize("case", CACHES, ids=str)


@every_cache
@every_dtype
@pytest.mark.parametrize("tokens", [7, 65])
def test_the_reference_norms_rotates_and_writes(case, dtype, tokens):
    check_mla_cache(case, partial(mla_cache, spec=case.spec(dtype).latent), dtype, CPU, tokens=tokens)


@every_cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("tokens", [7, 65])
def test_the_triton_kernel_norms_rotates_and_writes(case, dtype, tokens):
    from atom_core.kernels.mla_cache.triton_kernel import mla_cache as launch

    check_mla_cache(case, partial(launch, spec=case.spec(dtype).latent), dtype, CPU, tokens=tokens)


@every_cache
@every_fp8_dtype
def test_both_fill_an_fp8_cache(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.mla_cache.triton_kernel import mla_cache as launch

    spec = case.spec(torch.float16, cache_dtype).latent
    for kernel in (mla_cache, launch):
        check_mla_cache(case, partial(kernel, spec=spec), torch.float16, CPU, cache_dtype)


@every_cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16, 21])
def test_the_triton_kernel_also_folds_queries(case, dtype, tokens):
    from atom_core.kernels.mla_absorbed_queries.triton_kernel import TritonMlaAbsorbedQueries

    check_mla_absorbed_queries(
        case, TritonMlaAbsorbedQueries(case.spec(dtype).latent, overlap=False), dtype, CPU, tokens=tokens
    )


@every_cache
def test_many_tokens_queries_are_folded_by_larger_tiles(case):
    from atom_core.kernels.mla_absorbed_queries.triton_kernel import TritonMlaAbsorbedQueries

    launch = TritonMlaAbsorbedQueries(case.spec(torch.float16).latent, overlap=False)
    assert launch.max_tokens == 64
    launch.max_tokens = 256
    check_mla_absorbed_queries(case, launch, torch.float16, CPU, tokens=70)


@every_cache
@every_fp8_dtype
def test_it_fills_an_fp8_cache_as_well(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.mla_absorbed_queries.triton_kernel import TritonMlaAbsorbedQueries

    spec = case.spec(torch.float16, cache_dtype).latent
    check_mla_absorbed_queries(case, TritonMlaAbsorbedQueries(spec, overlap=False), torch.float16, CPU, cache_dtype)


def leave_parts(q, cache, batch, spec, parts, sums, least, keys):
    """What :class:`atom_core.kernels.mla_attention.hopper.LatentDecode` leaves, by its definition."""
    heads, starts = q.shape[1], batch.query_start_loc.tolist()
    for request, length in enumerate(batch.seq_lens.tolist()):
        token = starts[request]
        if starts[request + 1] == token:
            continue
        rows = cached_rows(cache, batch.pages.table[request], length)
        tiles = -(-length // keys)
        each = max(-(-tiles // len(parts)), least) * keys
        scores = q[token].float() @ rows.T * (spec.scale * 1.4426950408889634)
        for index, begin in enumerate(range(0, length, each)):
            part = scores[:, begin : begin + each]
            highest = part.max(1).values
            weights = torch.exp2(part - highest[:, None])
            at = slice(token * heads, (token + 1) * heads)
            parts[index, at] = weights @ rows[begin : begin + each, : spec.latent.rank]
            sums[index, at] = torch.stack((highest, weights.sum(1)), -1)


PARTED = (
    LatentCase("one token", ((192, 1),), heads=2),
    LatentCase("one short token", ((9, 1),), heads=2),
    LatentCase("more parts than rows", ((1300, 1), (70, 1)), heads=3, rank=64, value_dim=24),
    LatentCase("5 tokens", ((0, 1), (63, 1), (64, 1), (127, 1), (300, 1)), heads=4),
    LatentCase("padding", ((200, 1), (64, 1), (128, 1)), heads=4, padded_requests=3, padded_tokens=6),
)


@pytest.mark.parametrize("case", PARTED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("count", "least"), [(32, 1), (3, 1), (16, 2)])
def test_the_triton_kernel_joins_parts_to_values(monkeypatch, case, dtype, count, least):
    from atom_core.kernels.mla_absorbed_values import triton_kernel
    from atom_core.kernels.mla_attention.hopper import KEYS

    monkeypatch.setattr(triton_kernel, "_MIN_TILES", least)

    class Parted:
        def takes(self, *inputs):
            return True

        def __call__(self, q, cache, batch, expand, out):
            heads = q.shape[1]
            parts = torch.full((count, len(q) * heads, case.rank), float("nan"))
            sums = torch.full((count, len(q) * heads, 2), float("nan"))
            leave_parts(q, cache, batch, case.spec(dtype), parts, sums, least, KEYS)
            triton_kernel.merged_values(parts, sums, batch, expand, out, overlap=False)

    check_values(case, Parted(), latent_batch(case, dtype, CPU))


#: Tokens, heads, inputs, outputs, numbers that are carried over.
HEAD_PRODUCTS = [(1, 4, 16, 32, 8), (5, 3, 128, 64, 0), (17, 2, 40, 20, 12), (65, 2, 16, 70, 0)]


@pytest.mark.parametrize("shape", HEAD_PRODUCTS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_for_each_head(shape, transposed):
    from atom_core.kernels.head_linear.triton_kernel import head_linear as launch

    for dtype in (torch.float32, torch.float16):
        check_head_linear(head_linear, shape, dtype, CPU, transposed)
        check_head_linear(widened_head_linear, shape, dtype, CPU, transposed)
        check_head_linear(launch, shape, dtype, CPU, transposed)


def shape_of(**sizes):
    deepseek = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, **sizes}
    return LatentCase("", (), **deepseek).spec(torch.bfloat16).latent


@pytest.mark.parametrize(
    ("new", "length", "cheaper"),
    [(1, 1, True), (1, 2, False), (1, 4096, False), (8192, 8192, True), (150, 8192, False), (200, 8192, True)],
)
def test_latents_are_expanded_where_that_costs_less(new, length, cheaper):
    assert expanding_is_cheaper(new, length, shape_of()) is cheaper


def test_keys_are_cut_into_chunks_in_order():
    assert list(cut([1, 3], [9, 5, 9, 4], 6)) == [
        (Piece(1, 0, 5), Piece(3, 0, 1)),
        (Piece(3, 1, 3),),
    ]
    assert list(cut([0], [4], 2)) == [(Piece(0, 0, 2),), (Piece(0, 2, 2),)]


def test_a_plan_says_who_goes_which_way():
    case = LatentCase("", ((300, 1), (0, 40), (299, 2), (300, 1), (0, 9)), padded_requests=1)
    batch = latent_batch(case, torch.float32, CPU).batch
    plan = plan_prefill(batch, case.spec(torch.float32).latent)
    assert plan.expanded == (1, 4)
    assert [(run.begin, run.end, run.batch.num_requests) for run in plan.absorbed] == [(0, 1, 1), (41, 44, 2)]
    run = plan.absorbed[1].batch
    assert run.query_start_loc.tolist() == [0, 2, 3]
    assert (run.seq_lens.tolist(), run.max_query_len, run.num_tokens) == ([301, 301], 2, 3)
    (chunk,) = plan.chunks
    assert chunk.table.tolist() == [[1, 40, 0, 0, 0, 40], [44, 9, 0, 0, 40, 9]]
    assert (chunk.tile_starts.tolist(), chunk.num_queries) == ([0, 40], 49)
    pages, offsets = chunk.places(batch.pages.table, 16)
    assert pages[40] == batch.pages.table[4, 0]
    assert offsets[:18].tolist() == [*range(16), 0, 1]


def test_without_lengths_on_the_host_nothing_is_expanded():
    from dataclasses import replace

    case = LATENT_CASES[0]
    batch = latent_batch(case, torch.float32, CPU).batch
    assert plan_prefill(replace(batch, host=None), case.spec(torch.float32).latent) is None


def test_requests_that_decode_are_not_expanded():
    from dataclasses import replace

    case = LatentCase("", ((0, 1), (0, 1)))
    batch = replace(latent_batch(case, torch.float32, CPU).batch, num_decode_requests=2)
    assert plan_prefill(batch, case.spec(torch.float32).latent) is None


def test_triton_says_which_latents_are_too_long():
    (_, triton, _) = MLA_ATTENTION.implementations
    spec = LatentCase("", (), rank=576).spec(torch.bfloat16)
    assert "rank up to 512 and rope dimensions up to 64, not 576 and 16" in triton.supports(
        spec, Target("cuda", "sm90")
    )
