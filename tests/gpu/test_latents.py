"""Attention over latents on this GPU: the Triton kernels over every case, large batches, graphs and whole models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.head_linear.triton_kernel import head_linear
from atom_core.kernels.mla_absorbed_queries.triton_kernel import TritonMlaAbsorbedQueries
from atom_core.kernels.mla_absorbed_values.triton_kernel import TritonMlaAbsorbedValues
from atom_core.kernels.mla_attention.reference import ReferenceMlaAttention
from atom_core.kernels.mla_attention.triton_kernel import TritonMlaAttention
from atom_core.kernels.mla_cache.triton_kernel import mla_cache
from atom_core.kernels.mla_fused_decode.hopper import MlaFusedDecode
from atom_core.kernels.mla_prefill.plan import plan_prefill
from atom_core.kernels.mla_prefill.reference import ReferenceMlaPrefill
from atom_core.kernels.mla_prefill.triton_kernel import TritonMlaPrefill
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps, why_no_triton_cache
from atom_core.standalone import Runner
from tests.gpu.test_graphs import capture
from tests.kernel_cases import NAN, assert_close
from tests.latent_cases import (
    LATENT_CASES,
    LatentCase,
    check_absorbed,
    check_expanded,
    check_head_linear,
    check_mla_absorbed_queries,
    check_mla_cache,
    check_mla_fused_decode,
    check_values,
    latent_batch,
)
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, distance, greedy, logits, make_config, make_model
from tests.unit.core.models.test_deepseek import LITE, TOKENS, V2, V3

GPU = torch.device("cuda")
HERE = {"nvidia": torch.version.hip is None, "overlap": overlaps(Target.of(GPU))}
OVERLAP = {"overlap": HERE["overlap"]}
#: Of attention over latents: Hopper has a kernel of its own for decoding.
ATTENTION = {**HERE, "hopper": Target.of(GPU).arch == "sm90"}
CACHES = (None, *(dtype for dtype in FP8_DTYPES if why_no_triton_cache(torch.bfloat16, dtype, Target.of(GPU)) is None))

every_case = pytest.mark.parametrize("case", LATENT_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
every_cache = pytest.mark.parametrize("cache_dtype", CACHES, ids=str)

_SIZES = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
_LONG = ((4095, 1), (1000, 1), (17, 1), (2048, 513), (0, 700), (0, 1))
LARGE = (
    LatentCase("V2-Lite", _LONG, heads=16, **_SIZES),
    LatentCase("V3", _LONG, heads=128, page_size=64, **_SIZES),
    LatentCase("256 requests that decode", tuple((7 * at, 1) for at in range(256)), heads=16, **_SIZES),
)
_LENGTHS = tuple((length - 1, 1) for length in (1, 15, 16, 63, 64, 65, 127, 128, 129, 256, 257, 511, 1000, 4096))
DECODES = (
    LatentCase("16 heads", _LENGTHS, heads=16, **_SIZES),
    LatentCase("16 heads, one request", ((6000, 1),), heads=16, page_size=64, **_SIZES),
    LatentCase("one head, one token a page", _LENGTHS, heads=1, page_size=1, **_SIZES),
    LatentCase("20 heads", _LENGTHS, heads=20, **_SIZES),
    LatentCase("128 heads", _LENGTHS, heads=128, page_size=64, **_SIZES),
    LatentCase("128 heads, few requests", _LENGTHS[-4:], heads=128, page_size=64, **_SIZES),
    LatentCase("128 heads, 40 requests", tuple((29 * at, 1) for at in range(40)), heads=128, **_SIZES),
    LatentCase("padded requests and tokens", _LENGTHS, heads=16, padded_requests=3, padded_tokens=4, **_SIZES),
    LatentCase("140 requests", tuple((29 * at, 1) for at in range(140)), heads=16, **_SIZES),
    LatentCase(
        "200 requests, of all lengths up to three tiles", tuple((at, 1) for at in range(200)), heads=16, **_SIZES
    ),
    LatentCase(
        "150 requests, one token a page", tuple((5 * at, 1) for at in range(150)), heads=9, page_size=1, **_SIZES
    ),
    LatentCase(
        "300 requests, some of them padding",
        tuple((3 * at, 1) for at in range(290)),
        heads=16,
        padded_requests=10,
        padded_tokens=12,
        gap=64,
        **_SIZES,
    ),
    LatentCase(
        "200 requests, small latents",
        tuple((at, 1) for at in range(200)),
        heads=4,
        rank=64,
        nope_dim=16,
        rope_dim=16,
        value_dim=16,
    ),
    LatentCase("rows apart", _LENGTHS, heads=16, gap=64, **_SIZES),
    LatentCase("small latents", _LENGTHS, heads=4, rank=64, nope_dim=16, rope_dim=16, value_dim=16),
    *(
        LatentCase(f"{count} tokens are verified, {name}", tuple((at, count) for at in lengths), heads=heads, **_SIZES)
        for count in (2, 4, 8)
        for name, lengths, heads in (
            ("16 heads", (0, 13, 60, 61, 62, 63, 64, 120, 127, 256, 511, 1000, 4095), 16),
            ("one request", (6000,), 16),
            ("40 requests", tuple(29 * at for at in range(40)), 16),
            ("20 heads", (0, 56, 57, 63, 64, 510), 20),
            ("128 heads", (0, 57, 63, 1000), 128),
        )
    ),
    LatentCase("some drafted less", ((61, 4), (63, 1), (64, 2), (0, 3), (126, 3), (1022, 4)), heads=16, **_SIZES),
    LatentCase("drafts and padding", ((61, 3), (1022, 3)), heads=16, padded_requests=2, padded_tokens=6, **_SIZES),
)

#: What is left in parts: of few tokens, of requests longer than a tile.
VALUES = (
    *(
        case
        for case in DECODES
        if (sum(new for _, new in case.requests) + case.padded_tokens) * case.heads <= 512 and case.heads < 64
    ),
    LatentCase("one token", ((192, 1),), heads=16, **_SIZES),
    LatentCase("one token of 128 heads", ((3000, 1),), heads=128, page_size=64, **_SIZES),
    LatentCase("a token that begins a tile", ((64, 1), (128, 1), (63, 1)), heads=16, page_size=64, **_SIZES),
    LatentCase("32 requests", tuple((61 * at, 1) for at in range(32)), heads=16, **_SIZES),
    LatentCase("padded requests among 16", _LENGTHS[:12], heads=16, padded_requests=4, padded_tokens=4, **_SIZES),
)
hopper = pytest.mark.skipif(not ATTENTION["hopper"], reason="there are parts on Hopper alone")


@pytest.fixture
def all_expanded(monkeypatch):
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.expanding_is_cheaper", lambda new, *_: new > 0)


@every_case
@every_dtype
def test_the_absorbed_form(case, dtype):
    check_absorbed(case, TritonMlaAttention(case.spec(dtype), **ATTENTION), latent_batch(case, dtype, GPU))


@pytest.mark.parametrize("case", DECODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoding_alone(case, dtype):
    kernel = TritonMlaAttention(case.spec(dtype), **ATTENTION)
    for seed in range(2):  # what a launch leaves for the next must be as it was
        check_absorbed(case, kernel, latent_batch(case, dtype, GPU, seed))


@hopper
@pytest.mark.parametrize("case", VALUES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoding_to_values(case, dtype):
    kernel = TritonMlaAbsorbedValues(case.spec(dtype), **OVERLAP)
    for seed in range(2):
        check_values(case, kernel, latent_batch(case, dtype, GPU, seed), ulps=2)


@hopper
@pytest.mark.parametrize("before", [0, 1, 14, 15, 63, 64, 191, 192, 1023, 1024, 2046, 2047, 2048, 4090])
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_token_alone(before, heads, dtype):
    for page_size, interleaved in ((16, True), (64, False)):
        case = LatentCase(
            "", ((before, 1),), heads=heads, page_size=page_size, interleaved=interleaved, gap=64, **_SIZES
        )
        kernel = MlaFusedDecode(case.spec(dtype), **OVERLAP)
        for seed in range(2):
            check_mla_fused_decode(case, kernel, dtype, GPU, seed, max_seq_len=4096)


@every_case
@every_dtype
@pytest.mark.usefixtures("all_expanded")
@pytest.mark.parametrize("keys", [1024, 24])
def test_the_expanded_form(case, dtype, keys, monkeypatch):
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.BUFFER_BYTES", 0)
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.MIN_KEYS", keys)
    check_expanded(case, TritonMlaPrefill(case.spec(dtype), **HERE), latent_batch(case, dtype, GPU), ulps=2)


@pytest.mark.parametrize("case", LARGE, ids=str)
@every_cache
@torch.inference_mode()
def test_both_forms_over_large_batches(case, cache_dtype):
    inputs = latent_batch(case, torch.bfloat16, GPU, cache_dtype=cache_dtype)
    spec, truth = case.spec(torch.bfloat16, cache_dtype), case.spec(torch.float32)
    found = torch.full((*inputs.q.shape[:2], case.rank), NAN, dtype=torch.bfloat16, device=GPU)
    expected = found.float()
    TritonMlaAttention(spec, **ATTENTION)(inputs.folded, inputs.cache, inputs.batch, found)
    ReferenceMlaAttention(truth)(inputs.folded.float(), inputs.cache, inputs.batch, expected)
    assert_close(found, expected.double().cpu())
    plan = plan_prefill(inputs.batch, spec.latent)
    if plan is None:
        return
    found = torch.full((*inputs.q.shape[:2], case.value_dim), NAN, dtype=torch.bfloat16, device=GPU)
    expected = found.float()
    TritonMlaPrefill(spec, **HERE)(inputs.q, inputs.expand, inputs.cache, inputs.batch, plan, found)
    wide = (inputs.q.float(), inputs.expand.float())
    ReferenceMlaPrefill(truth)(*wide, inputs.cache, inputs.batch, plan, expected)
    written = ~expected.isnan()
    assert torch.equal(written, ~found.isnan())
    assert_close(found[written], expected[written].double().cpu(), ulps=2)


@every_case
@every_cache
@every_dtype
def test_norm_rope_and_cache(case, dtype, cache_dtype):
    launch = partial(mla_cache, spec=case.spec(dtype, cache_dtype).latent, **OVERLAP)
    check_mla_cache(case, launch, dtype, GPU, cache_dtype)


@every_case
@every_cache
@every_dtype
@pytest.mark.parametrize("tokens", [1, 16, 64, 65, 256])
def test_norm_rope_cache_and_folded_queries(case, dtype, cache_dtype, tokens):
    launch = TritonMlaAbsorbedQueries(case.spec(dtype, cache_dtype).latent, **OVERLAP)
    check_mla_absorbed_queries(case, launch, dtype, GPU, cache_dtype, min(tokens, launch.max_tokens))


@every_dtype
@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
def test_products_for_each_head(tokens, dtype):
    for sizes, transposed in (((128, 512, 64), False), ((512, 128, 0), True)):
        check_head_linear(partial(head_linear, **OVERLAP), (tokens, 16, *sizes), dtype, GPU, transposed)


@hopper
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_that_decodes_to_values_replays_for_other_lengths(heads):
    weight = torch.randn(heads, _SIZES["rank"], _SIZES["rank"], dtype=torch.bfloat16, device=GPU)

    def build(spec):
        kernel = TritonMlaAbsorbedValues(spec, **OVERLAP)
        return lambda q, cache, batch, out: kernel(q, cache, batch, weight.transpose(1, 2), out)

    check_replays(build, heads)


def check_replays(build, heads):
    """A graph of the kernel that ``build`` makes of a spec answers batches of other lengths."""
    many = tuple((100 * at, 1) for at in range(8))
    case = LatentCase("", many, heads=heads, **_SIZES)
    kernel = build(case.spec(torch.bfloat16))
    first = latent_batch(case, torch.bfloat16, GPU)
    batch = replace(first.batch, max_seq_len=4096, host=None)
    out = torch.empty(len(many), heads, case.rank, dtype=torch.bfloat16, device=GPU)
    graph = capture(lambda: kernel(first.folded, first.cache, batch, out))
    for requests in (many, tuple((90 * at + 3, 1) for at in range(8))):
        other = replace(case, requests=requests)
        inputs = latent_batch(other, torch.bfloat16, GPU, seed=1)
        pages = len(inputs.cache.rows)
        first.cache.rows[:pages] = inputs.cache.rows
        first.folded.copy_(inputs.folded)
        batch.seq_lens.copy_(inputs.batch.seq_lens)
        width = min(batch.pages.table.shape[1], inputs.batch.pages.table.shape[1])
        batch.pages.table[:, :width] = inputs.batch.pages.table[:, :width]
        out.fill_(NAN)
        graph.replay()
        expected = torch.empty_like(out)
        kernel(inputs.folded, inputs.cache, replace(inputs.batch, max_seq_len=4096), expected)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_for_other_lengths(heads):
    check_replays(partial(TritonMlaAttention, **ATTENTION), heads)


@pytest.mark.parametrize(("family", "settings"), [(V3, {}), (V2, LITE)], ids=str)
def test_logits_and_greedy_tokens_are_hugging_faces(tmp_path, family, settings):
    model = make_model(tmp_path, make_config(family, **settings))
    runner = Runner(tmp_path, device=GPU)
    chosen = {choice.op: choice.implementation for choice in runner.runtime.kernels.choices()}
    ops = ("mla_cache", "head_linear", "mla_attention", "mla_prefill")
    assert {chosen[op] for op in ops} == {"triton"}
    assert distance(runner.logits(TOKENS).cpu(), logits(model, TOKENS)) <= LOGITS_TOLERANCE
    prompts = [TOKENS[:20], TOKENS[3:4], TOKENS[5:21]]
    assert runner.generate(prompts, 20) == [greedy(model, prompt, 20) for prompt in prompts]
