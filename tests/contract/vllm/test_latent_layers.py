"""Our attention layers over vLLM's caches of latents: what they ask for, how they read them, and what steps are planned
by.
"""

from __future__ import annotations

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

from atom_core.kernels.mla_cache import MlaWeights
from atom_core.mixers.mla import MlaMixer
from atom_core.standalone import build_runtime
from atom_plugin.vllm.attention import VllmPagedAttention
from atom_plugin.vllm.attention_backends import (
    AtomDecodeGraphMetadataBuilder,
    AtomGraphMLABackend,
    AtomMetadataBuilder,
    AtomMLABackend,
)
from atom_plugin.vllm.runtime import cache_dtype
from tests.contract.vllm.test_attention_layers import CHECKPOINT, DTYPES, FP8, NAME
from tests.latent_cases import LatentCase, latent_batch

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CPU, BLOCK = torch.device("cpu"), 16
CASE = LatentCase("", ((0, 40), (300, 2)), page_size=BLOCK)


def layer_of(name="auto", speculative=None):
    """A layer with a cache of the dtype that vLLM calls `name`, and vLLM's configuration."""
    model = ModelConfig(str(CHECKPOINT), dtype="bfloat16")
    cache = CacheConfig(cache_dtype=name, block_size=BLOCK)
    config = VllmConfig(model_config=model, cache_config=cache, speculative_config=speculative)
    runtime = build_runtime(CPU, torch.bfloat16, 512, cache_dtype=cache_dtype(name, model))
    still = torch.cat([torch.ones(512, 8), torch.zeros(512, 8)], 1)
    expand = latent_batch(CASE, torch.bfloat16, CPU).expand
    weights = MlaWeights(still, torch.ones(CASE.rank, dtype=torch.bfloat16), 1e-6, expand)
    with set_current_vllm_config(config):
        mixer = MlaMixer(NAME, 0, CASE.spec(torch.bfloat16, runtime.cache_dtype), weights)
        return VllmPagedAttention(mixer, runtime), config


def common(requests):
    """vLLM's description of a batch: (tokens cached before, new tokens) of each request."""
    inputs = latent_batch(LatentCase("", requests, page_size=BLOCK), torch.bfloat16, CPU)
    found = inputs.batch
    return CommonAttentionMetadata(
        query_start_loc=found.query_start_loc,
        query_start_loc_cpu=found.query_start_loc,
        seq_lens=found.seq_lens,
        num_reqs=found.num_requests,
        num_actual_tokens=found.num_tokens,
        max_query_len=found.max_query_len,
        max_seq_len=found.max_seq_len,
        block_table_tensor=found.pages.table,
        slot_mapping=found.pages.slots,
        seq_lens_cpu_upper_bound=found.seq_lens,
    )


@pytest.mark.parametrize("name", DTYPES)
def test_vllm_counts_the_bytes_of_one_row_a_token(name):
    layer, config = layer_of(name)
    spec = layer.get_kv_cache_spec(config)
    assert isinstance(spec, MLAAttentionSpec)
    assert spec.page_size_bytes == BLOCK * (CASE.rank + CASE.rope_dim) * DTYPES[name].itemsize
    assert spec.dtype == (torch.uint8 if name in FP8 else torch.bfloat16)
    assert spec.kv_quant_mode == (KVQuantMode.FP8_PER_TENSOR if name in FP8 else KVQuantMode.NONE)


def test_what_is_captured_are_decodes():
    layer, _ = layer_of()
    assert layer.get_attn_backend() is AtomMLABackend, "the reference reads lengths on the host"
    layer.mixer.kernel.graph_support = "always"
    assert layer.get_attn_backend() is AtomGraphMLABackend
    assert AtomDecodeGraphMetadataBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    assert AtomMetadataBuilder._cudagraph_support == AttentionCGSupport.NEVER


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_what_is_written_is_read_with_the_layer_s_scale(name, dims):
    layer, config = layer_of(name)
    scale = 0.05 if name in FP8 else 1.0
    layer.set_scales(scale, scale)
    stored = layer.get_kv_cache_spec(config).dtype
    pages = torch.zeros(4, BLOCK, CASE.rank + CASE.rope_dim, dtype=stored)
    layer.kv_cache = pages[:, None] if dims == 4 else pages
    inputs = common(((0, 20),))
    builder = AtomMetadataBuilder(layer.get_kv_cache_spec(config), [NAME], config, CPU)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(20, CASE.heads * (CASE.nope_dim + CASE.rope_dim), generator=generator).bfloat16()
    latent = torch.randn(20, CASE.rank + CASE.rope_dim, generator=generator).bfloat16()
    batch = builder.build(0, inputs)
    with override_forward_context(create_forward_context({NAME: batch}, config)):
        out = layer((q.clone(), latent), torch.arange(20))
    assert out.shape == (20, CASE.heads * CASE.value_dim)
    view = layer.cache()
    assert view.rows.dtype == DTYPES[name]
    assert view.scale == scale
    found = view.rows.float().flatten(0, 1)[inputs.slot_mapping] * scale
    wide = latent.float()
    normed = wide[:, : CASE.rank] / wide[:, : CASE.rank].square().mean(-1, keepdim=True).sqrt()
    close = {"rtol": 0.1 if name in FP8 else 0.02, "atol": 0.02}
    torch.testing.assert_close(found, torch.cat((normed, wide[:, CASE.rank :]), -1), **close)
    assert out.isfinite().all()


def test_a_run_without_a_batch_gives_zeros():
    layer, config = layer_of()
    with override_forward_context(create_forward_context(None, config)):
        out = layer((torch.ones(3, 4 * 32).bfloat16(), torch.ones(3, 48).bfloat16()), torch.arange(3))
    assert out.shape == (3, 64)
    assert not out.any()


def test_prompts_are_planned_and_decodes_are_not():
    layer, config = layer_of()
    builder = AtomMetadataBuilder(layer.get_kv_cache_spec(config), [NAME], config, CPU)
    found = builder.build(0, common(((30, 1), (0, 1), (0, 40), (300, 2))))
    assert (found.num_decode_requests, found.num_decode_tokens) == (2, 2)
    assert list(found.host.lengths) == [31, 1, 40, 302]
    assert found.plans[layer.mixer.plan_key()].expanded == (2,)
    decode = builder.build(0, common(((30, 1), (0, 1))))
    assert decode.host is None
    assert decode.plans[layer.mixer.plan_key()] is None


def test_drafts_that_are_verified_are_decodes():
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    layer, config = layer_of(speculative=drafts)
    builder = AtomMetadataBuilder(layer.get_kv_cache_spec(config), [NAME], config, CPU)
    found = builder.build(0, common(((30, 4), (20, 4))))
    assert (found.num_decode_requests, found.num_decode_tokens, found.host) == (2, 8, None)
