"""FlashAttention 3 over our pages on a Hopper GPU with vLLM: what attention is, also from a captured graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.attention.flash_attention_3 import why_no_flash_attention_3
from atom_core.kernels.select import Target
from atom_plugin.vllm.flash_attention import VllmFlashAttention3
from atom_plugin.vllm.flash_mla_attention import FlashMlaAttention3, why_no_flash_mla_attention
from tests.gpu.test_latents import check_replays
from tests.kernel_cases import ATTENTION_CASES, NAN, AttentionCase, assert_close, attention_batch, check_attention
from tests.latent_cases import LATENT_CASES, LatentCase, check_absorbed, latent_batch

GPU = torch.device("cuda", 0)
#: Heads that the kernel has, in a cache that it can copy from: the other case's strides are odd.
CASES = [case for case in ATTENTION_CASES if case.dim % 8 == 0 and case.packed]
#: As DeepSeek's models have them.
LATENTS = [replace(case, rank=512, rope_dim=64) for case in LATENT_CASES if not case.gap]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_attention(case: AttentionCase, dtype: torch.dtype) -> None:
    if case.sinks and dtype != torch.bfloat16:
        assert why_no_flash_attention_3(case.spec(dtype), Target.of(GPU)) is not None
        return
    inputs = attention_batch(case, dtype, GPU)
    check_attention(VllmFlashAttention3(case.spec(dtype)), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_it_is_attention_over_latents(case: LatentCase, dtype: torch.dtype) -> None:
    assert why_no_flash_mla_attention(case.spec(dtype), Target.of(GPU)) is None
    check_absorbed(case, FlashMlaAttention3(case.spec(dtype)), latent_batch(case, dtype, GPU))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_over_latents_answers_batches_of_other_lengths(heads: int) -> None:
    check_replays(FlashMlaAttention3, heads)


def test_a_captured_graph_answers_batches_of_other_lengths() -> None:
    case = AttentionCase("captured", ((1040, 4), (700, 4), (0, 4)), heads=32, kv_heads=8, dim=128)
    other = AttentionCase("replayed", ((3, 4), (1000, 4), (500, 4)), heads=32, kv_heads=8, dim=128)
    kernel = VllmFlashAttention3(case.spec(torch.bfloat16))
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
