"""Our attention layers over caches that vLLM makes: what they ask for, how they read it, and whose scales count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from atom_core.batch import Batch, Pages
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.mixers.attention import AttentionMixer
from atom_core.standalone import build_runtime
from atom_plugin.vllm.attention import VllmPagedAttention
from atom_plugin.vllm.attention_backends import AtomShuffledAttentionBackend
from atom_plugin.vllm.framework_attention import FrameworkAttention
from atom_plugin.vllm.runtime import cache_dtype, same_step_reads

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "qwen3"
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 32
NAME = "model.layers.0.self_attn.attn"
DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def layer_of(kind, name, window=None, sinks=None):
    """A layer with a cache of the dtype that vLLM calls `name`, and vLLM's configuration."""
    model = ModelConfig(str(CHECKPOINT), dtype="bfloat16")
    config = VllmConfig(model_config=model, cache_config=CacheConfig(cache_dtype=name, block_size=BLOCK))
    runtime = build_runtime(torch.device("cpu"), torch.bfloat16, 256, cache_dtype=cache_dtype(name, model))
    qkv = QkvSpec(HEADS, KV_HEADS, DIM, rotary_dim=DIM, interleaved=False, qk_norm=False, dtype=torch.bfloat16)
    weights = QkvWeights(torch.cat([torch.ones(256, DIM // 2), torch.zeros(256, DIM // 2)], 1))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            return kind(AttentionMixer(NAME, 0, qkv, weights, sinks, window, runtime), runtime), config
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_a_cache_has_the_dtype_that_its_name_says(name):
    assert cache_dtype(name, ModelConfig(str(CHECKPOINT), dtype="bfloat16")) == DTYPES[name]


@pytest.mark.parametrize(
    ("prefix_caching", "connector", "reads"),
    [(True, None, "at page starts"), (True, "a connector", "anywhere"), (False, "a connector", "never")],
)
def test_pages_are_shared_in_the_step_that_fills_them_where_prefixes_are_cached(prefix_caching, connector, reads):
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    assert same_step_reads(SimpleNamespace(cache_config=cache, kv_transfer_config=connector)) == reads


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_e4m3_is_the_platform_s(name, monkeypatch):
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    assert cache_dtype(name, ModelConfig(str(CHECKPOINT), dtype="bfloat16")) == torch.float8_e4m3fnuz


@pytest.mark.parametrize(
    ("blocks", "dtype", "pages"),
    [
        (16, torch.uint8, 16),
        (256, torch.uint8, 256),
        (768, torch.uint8, 256),
        (1024, torch.uint8, 1024),
        (128, torch.uint8, 16),
        (256, torch.bfloat16, 16),
        *((blocks, dtype, 16) for blocks in (528, 544, 800) for dtype in (torch.uint8, torch.bfloat16)),  # of hybrids
    ],
)
def test_shuffled_pages_are_of_the_tokens_that_aiters_kernels_have(blocks, dtype, pages):
    spec = FullAttentionSpec(block_size=blocks, num_kv_heads=KV_HEADS, head_size=128, dtype=dtype)
    assert AtomShuffledAttentionBackend.get_supported_kernel_block_sizes(spec) == [pages]
    assert AtomShuffledAttentionBackend.get_supported_kernel_block_sizes() == [16]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("name", DTYPES)
def test_vllm_counts_the_bytes_that_a_page_has(name, window):
    layer, config = layer_of(VllmPagedAttention, name, window)
    spec = layer.get_kv_cache_spec(config)
    assert spec.page_size_bytes == BLOCK * KV_HEADS * 2 * DIM * DTYPES[name].itemsize
    assert spec.dtype == (torch.uint8 if name in FP8 else torch.bfloat16)
    assert spec.kv_quant_mode == (KVQuantMode.FP8_PER_TENSOR if name in FP8 else KVQuantMode.NONE)


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_written_is_read_with_the_layer_s_scales(name):
    layer, config = layer_of(VllmPagedAttention, name)
    scales = (0.5, 2.0) if name in FP8 else (1.0, 1.0)
    layer.set_scales(*scales)
    stored = layer.get_kv_cache_spec(config).dtype
    layer.kv_cache = torch.zeros(3, BLOCK, KV_HEADS, 2 * DIM, dtype=stored).transpose(1, 2)
    tokens, first = 5, 2 * BLOCK
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(0))
    k, v = qkv[:, HEADS * DIM :].unflatten(1, (2, KV_HEADS, DIM)).unbind(1)
    batch = Batch(
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        pages=Pages(torch.tensor([[2]], dtype=torch.int32), torch.arange(first, first + tokens)),
        num_requests=1,
        num_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
    )
    with override_forward_context(create_forward_context({NAME: batch}, config)):
        out = layer((qkv.bfloat16(),), torch.arange(tokens))
    view = layer.cache()
    assert view.key.dtype == view.value.dtype == DTYPES[name]
    close = {"rtol": 0.15 if name in FP8 else 0.01, "atol": 0.01}
    for side, given, scale in zip((view.key, view.value), (k, v), scales, strict=True):
        found = side[2, :, :tokens].float().transpose(0, 1) * scale
        torch.testing.assert_close(found, given, **close)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (qkv[:, : HEADS * DIM].unflatten(1, (HEADS, DIM)), k, v)),
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(out.float(), attended[0].transpose(0, 1).flatten(1), rtol=0.3, atol=0.3)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's own attention has no FP8 caches on AVX2")
def test_vllm_s_own_layer_has_the_scales_after_all_hooks():
    layer, _ = layer_of(FrameworkAttention, "fp8")
    host = layer.attention
    layer.set_scales(0.5, 2.0)
    host.process_weights_after_loading(torch.bfloat16)
    assert host._k_scale == host._v_scale == 1.0, "vLLM no longer resets scales: they need not be handed over again"
    layer.hand_over()
    assert (host._k_scale, host._v_scale) == (0.5, 2.0)
    assert (host._k_scale_cpu, host._v_scale_cpu) == (0.5, 2.0)
    assert (host._k_scale_float, host._v_scale_float) == (0.5, 2.0)


def test_vllm_s_own_layer_has_the_sinks_that_were_loaded():
    sinks = torch.empty(HEADS)
    layer, _ = layer_of(FrameworkAttention, "auto", sinks=sinks)
    sinks.copy_(torch.arange(HEADS))
    layer.hand_over()
    assert layer.attention.impl.sinks.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert layer.attention.impl.sinks.dtype == torch.bfloat16
