"""The Triton kernels inside a captured graph, replayed for batches of other lengths in buffers refilled in place.

Graphs are captured once for a number of requests and tokens, so a smaller batch is padded: requests without tokens,
tokens without a slot.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from atom_core.batch import Pages
from atom_core.cache import KVCacheView
from atom_core.kernels.attention.triton_kernel import TritonAttention
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.kernels.qk_norm_rope_cache import reference, triton_kernel
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps
from tests.kernel_cases import NAN, AttentionCase, QkvCase, assert_close, attention_batch

GPU = torch.device("cuda")
REQUESTS, TOKENS, PAGES, PAGES_EACH = 8, 64, 256, 64

BATCHES = (
    ((0, 1),),
    ((15, 1), (16, 1), (31, 1), (500, 1), (0, 1)),
    tuple((100 * index, 1) for index in range(REQUESTS)),
    ((0, 33), (64, 7), (17, 1)),
    ((200, 8),) * 8,
)
LAYERS = (
    {},
    {"window": 20, "sinks": True},
    {"soft_cap": 3.0, "storage": "HPN", "heads": 8, "kv_heads": 1, "dim": 80},
)


def capture(run):
    """A graph of ``run``, after a first run that compiles its kernels."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def padded_batch(requests, dtype, **layer):
    new = sum(count for _, count in requests)
    case = AttentionCase("", requests, padded_requests=REQUESTS - len(requests), padded_tokens=TOKENS - new, **layer)
    return case, attention_batch(case, dtype, GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("captured", [0, 3], ids=["captured while decoding", "captured with a prefill"])
def test_attention_is_replayed_for_other_lengths(captured, layer, dtype):
    case, first = padded_batch(BATCHES[captured], dtype, **layer)
    pool = torch.full((PAGES, case.kv_heads, case.page_size, 2 * case.dim), NAN, dtype=dtype, device=GPU)
    cache = KVCacheView.of_packed(pool, case.dim)
    batch = replace(
        first.batch,
        pages=Pages(torch.zeros(REQUESTS, PAGES_EACH, dtype=torch.int32, device=GPU), first.batch.pages.slots),
        max_seq_len=PAGES_EACH * case.page_size,
    )
    q, out = torch.empty_like(first.q), torch.empty_like(first.q)
    sinks = first.sinks
    target = Target.of(GPU)
    hopper = (target.kind, target.arch) == ("cuda", "sm90")
    kernel = TritonAttention(case.spec(dtype), torch.version.hip is None, overlaps(target), hopper)

    def fill(inputs):
        pool.fill_(NAN)
        pages = inputs.cache.key.shape[0]
        cache.key[:pages] = inputs.cache.key
        cache.value[:pages] = inputs.cache.value
        batch.pages.slots.copy_(inputs.batch.pages.slots)
        for name in ("query_start_loc", "seq_lens"):
            getattr(batch, name).copy_(getattr(inputs.batch, name))
        batch.pages.table.zero_()[:, : inputs.batch.pages.table.shape[1]] = inputs.batch.pages.table
        q.copy_(inputs.q)
        out.fill_(NAN)
        if sinks is not None:
            sinks.copy_(inputs.sinks)

    fill(first)
    graph = capture(lambda: kernel(q, cache, batch, sinks, out))
    for requests in (*BATCHES, *reversed(BATCHES)):
        _, inputs = padded_batch(requests, dtype, **layer)
        fill(inputs)
        graph.replay()
        torch.cuda.synchronize()
        num_real = inputs.expected.shape[0]
        assert_close(out[:num_real], inputs.expected)
        assert out[num_real:].isnan().all(), "rows of padding were written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_cache_is_filled_at_other_slots_and_positions(dtype):
    case = QkvCase("", heads=8, kv_heads=2, dim=64, rotary_dim=64, qk_norm=True)
    spec = case.spec(dtype)
    shape = (PAGES, case.kv_heads, case.page_size, 2 * case.dim)
    weights = QkvWeights(
        torch.randn(1000, case.rotary_dim, device=GPU),
        torch.rand(case.dim, device=GPU).to(dtype),
        torch.rand(case.dim, device=GPU).to(dtype),
        1e-6,
    )
    qkv = torch.empty(TOKENS, (case.heads + 2 * case.kv_heads) * case.dim, dtype=dtype, device=GPU)
    positions = torch.zeros(TOKENS, dtype=torch.int64, device=GPU)
    slots = torch.full((TOKENS,), -1, dtype=torch.int64, device=GPU)
    q = torch.empty(TOKENS, case.heads, case.dim, dtype=dtype, device=GPU)
    ours, theirs = (KVCacheView.of_packed(torch.empty(shape, dtype=dtype, device=GPU), case.dim) for _ in range(2))

    launch = partial(triton_kernel.qk_norm_rope_cache, spec=spec)
    graph = capture(lambda: q.copy_(launch(qkv, positions, weights, ours, slots)))
    for seed, num_real in enumerate((TOKENS, 1, 17, 0, 40)):
        torch.manual_seed(seed)
        qkv.normal_()
        positions.random_(1000)
        slots.fill_(-1)[:num_real] = torch.randperm(PAGES * case.page_size, device=GPU)[:num_real]
        for cache in (ours, theirs):
            cache.key.fill_(NAN)
            cache.value.fill_(NAN)
        graph.replay()
        expected = reference.qk_norm_rope_cache(qkv, positions, weights, theirs, slots, spec=spec)
        assert_close(q, expected.double().cpu())
        for mine, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
            assert torch.equal(mine.isnan(), other.isnan())
            assert_close(mine.nan_to_num(), other.nan_to_num().double().cpu())
