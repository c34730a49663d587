"""FlashAttention 3 over our pages on a Hopper GPU: what attention is, also from a captured graph.

By vLLM's binding and by SGLang's, each where its package is there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atom_core.kernels.attention import PagedAttentionSpec
from atom_core.kernels.attention.flash_attention_3 import FlashAttention3, why_no_flash_attention_3
from atom_core.kernels.select import Target
from atom_plugin.sglang import flash_attention as sglang
from atom_plugin.vllm import flash_attention as vllm
from atom_plugin.vllm.flash_mla_attention import FlashMlaAttention3, why_no_flash_mla_attention
from tests.gpu.test_latents import check_replays
from tests.kernel_cases import ATTENTION_CASES, NAN, AttentionCase, assert_close, attention_batch, check_attention
from tests.latent_cases import LATENT_CASES, LatentCase, check_absorbed, latent_batch

GPU = torch.device("cuda", 0)
#: Heads that the kernel has, in a cache that it can copy from: the other case's strides are odd.
CASES = [case for case in ATTENTION_CASES if case.dim % 8 == 0 and case.packed]
#: Prompts with and without a prefix, beside a request that decodes; in one token a page, as SGLang's pools are, too.
PROMPTS = ((700, 1030), (0, 600), (90, 1))
LONG = [
    AttentionCase(f"{dim}, {page_size} a page", PROMPTS, heads=16, kv_heads=2, dim=dim, page_size=page_size)
    for dim in (64, 128, 256)
    for page_size in (1, 16, 64)
]
LONG += [
    replace(case, name=f"{case}, a window and sinks", window=128, sinks=True, keeps_left=True) for case in LONG[:2]
]
#: As DeepSeek's models have them.
LATENTS = [replace(case, rank=512, rope_dim=64) for case in LATENT_CASES if not case.gap]
#: Only vLLM's binding is used for latents.
of_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not there")

Build = Callable[[PagedAttentionSpec], FlashAttention3]


@pytest.fixture(params=["vllm", "sgl_kernel.flash_attn"])
def build(request: pytest.FixtureRequest) -> Build:
    """Makes the kernel over a binding."""
    pytest.importorskip(request.param, exc_type=ImportError)
    if request.param == "vllm":
        assert vllm.why_not_here() is None
        return vllm.VllmFlashAttention3
    assert sglang.why_not_here() is None
    return sglang.SglangFlashAttention3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_attention(build: Build, case: AttentionCase, dtype: torch.dtype) -> None:
    reason = why_no_flash_attention_3(case.spec(dtype), Target.of(GPU))
    assert (reason is not None) == (case.sinks and dtype != torch.bfloat16)
    if reason is None:
        check_attention(build(case.spec(dtype)), attention_batch(case, dtype, GPU))


@pytest.mark.parametrize("case", LONG, ids=str)
def test_it_is_attention_of_long_prompts(build: Build, case: AttentionCase) -> None:
    inputs = attention_batch(case, torch.bfloat16, GPU, by_token=False)
    check_attention(build(case.spec(torch.bfloat16)), inputs)


@of_vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_it_is_attention_over_latents(case: LatentCase, dtype: torch.dtype) -> None:
    assert why_no_flash_mla_attention(case.spec(dtype), Target.of(GPU)) is None
    check_absorbed(case, FlashMlaAttention3(case.spec(dtype)), latent_batch(case, dtype, GPU))


@of_vllm
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_over_latents_answers_batches_of_other_lengths(heads: int) -> None:
    check_replays(FlashMlaAttention3, heads)


def test_a_captured_graph_answers_batches_of_other_lengths(build: Build) -> None:
    case = AttentionCase("captured", ((1040, 4), (700, 4), (0, 4)), heads=32, kv_heads=8, dim=128)
    other = AttentionCase("replayed", ((3, 4), (1000, 4), (500, 4)), heads=32, kv_heads=8, dim=128)
    kernel = build(case.spec(torch.bfloat16))
    inputs, later = (attention_batch(it, torch.bfloat16, GPU) for it in (case, other))
    out = torch.full_like(inputs.q, NAN)
    kernel(inputs.q, inputs.cache, inputs.batch, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(inputs.q, inputs.cache, inputs.batch, None, out)
    graph.replay()
    assert_close(out, inputs.expected)
    pages = min(inputs.cache.key.shape[0], later.cache.key.shape[0])
    assert pages == later.cache.key.shape[0], "the captured batch has room for the other's pages"
    for mine, theirs in ((inputs.cache.key, later.cache.key), (inputs.cache.value, later.cache.value)):
        mine[:pages].copy_(theirs)
    width = later.batch.pages.table.shape[1]
    inputs.batch.pages.table[:, :width].copy_(later.batch.pages.table)
    inputs.batch.seq_lens.copy_(later.batch.seq_lens)
    inputs.batch.query_start_loc.copy_(later.batch.query_start_loc)
    inputs.q.copy_(later.q)
    graph.replay()
    assert_close(out, later.expected)
