"""The batches that a model is warmed up with: of every kind, within the engine's limits, and without a trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atom_core.checkpoint import read_config_json
from atom_core.config import ModelConfig
from atom_core.models.read_config import read_model_config
from atom_core.runtime import PipelineStage
from atom_core.standalone import Step, build_runtime, page_pools, random_model
from atom_core.warmup import Batch, batches_to_serve, metadata_of, run_batch

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "qwen3"
PAGE_SIZE, TABLE_WIDTH = 16, 24


@pytest.mark.parametrize(
    ("max_requests", "max_tokens", "max_seq_len"), [(1, 1, 1), (1, 64, 32), (4, 8, 4096), (200, 8192, 40960)]
)
def test_batches_are_within_the_limits_and_none_comes_twice(max_requests, max_tokens, max_seq_len):
    batches = batches_to_serve(max_requests, max_tokens, max_seq_len)
    assert len(set(batches)) == len(batches) < 120
    for batch in batches:
        assert 1 <= len(batch.queries) <= max_requests
        assert sum(batch.queries) <= max_tokens
        assert max(batch.queries) + batch.cached <= batch.max_seq_len <= max_seq_len


def test_batches_are_of_every_kind():
    batches = batches_to_serve(200, 8192, 40960)
    assert Batch((1,), 40960) in batches, "one request that decodes"
    assert Batch((1,) * 200, 40960) in batches, "as many as there may be"
    assert {len(batch.queries) for batch in batches} >= {1, 2, 3, 8, 200}
    assert any(len(set(batch.queries)) == 2 for batch in batches), "decodes beside a prompt"
    prompts = {sum(batch.queries) for batch in batches if min(batch.queries) > 1}
    assert any(tokens % 16 == 0 for tokens in prompts)
    assert any(tokens % 2 for tokens in prompts)
    assert Batch((8,), 40960, 64) in batches, "a prompt that is cached but for a few tokens"
    assert {batch.max_seq_len for batch in batches if batch.queries == (1,)} >= {64, 4096, 40960}


@pytest.mark.parametrize(
    ("max_seq_len", "prompts"), [(100, (*(100,) * 81, 92)), (2048, (2048,) * 4), (40960, (2048,) * 4)]
)
def test_as_many_tokens_as_there_may_be_are_prompts_of_lengths_that_there_may_be(max_seq_len, prompts):
    """However short requests are: experts of many tokens have kernels of their own."""
    whole = [batch.queries for batch in batches_to_serve(200, 8192, max_seq_len) if sum(batch.queries) == 8192]
    assert whole == [prompts]


def test_a_batch_has_no_slots_and_only_the_first_page(config):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(config, runtime)
    metadata = metadata_of(Batch((1, 1, 40), 256), model, TABLE_WIDTH, runtime.device)
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 42]
    assert metadata.seq_lens.tolist() == [1, 1, 40]
    behind = metadata_of(Batch((2,), 256, 64), model, TABLE_WIDTH, runtime.device)
    assert (behind.seq_lens.tolist(), behind.host.lengths) == ([66], (66,))
    assert (metadata.slot_mapping == -1).all()
    assert not metadata.page_table.any()
    assert metadata.page_table.shape == (3, TABLE_WIDTH)
    assert (metadata.num_decode_requests, metadata.num_decode_tokens) == (2, 2)
    assert (metadata.num_requests, metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len) == (
        3,
        42,
        40,
        256,
    )
    assert set(metadata.plans) == {layer.self_attn.attn.kernel.plan_key() for layer in model.model.layers} - {None}


@pytest.mark.parametrize("kernels", [{}, {"attention": "reference", "qk_norm_rope_cache": "reference"}])
def test_all_of_them_run_and_leave_no_trace_in_the_cache(config, kernels):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256, kernels)
    model = random_model(config, runtime)
    caches = page_pools(config, runtime, 2, PAGE_SIZE, random=True)
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]
    announced = []

    def announce(metadata):
        announced.append(metadata)
        return nullcontext(Step(metadata, caches))

    batches = batches_to_serve(20, 512, 256)
    for batch in batches:
        run_batch(batch, model, runtime, TABLE_WIDTH, announce)
    assert len(announced) == len(batches)
    for cache, (key, value) in zip(caches, before, strict=True):
        assert torch.equal(cache.key, key)
        assert torch.equal(cache.value, value)


def test_prompts_over_latents_are_expanded_and_decodes_and_few_tokens_behind_cached_ones_are_not(latents):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(latents, runtime)
    caches = page_pools(latents, runtime, 2, PAGE_SIZE, random=True)
    before = [cache.rows.clone() for cache in caches]
    key = model.model.layers[0].self_attn.attn.plan_key()
    expanded = {}

    def announce(metadata):
        plan = metadata.plans[key]
        expanded[metadata.host.lengths] = () if plan is None else plan.expanded
        return nullcontext(Step(metadata, caches))

    for batch in batches_to_serve(20, 512, 256):
        run_batch(batch, model, runtime, TABLE_WIDTH, announce)
    assert (expanded[(1, 1)], expanded[(64,)], expanded[(1, 1, 64)]) == ((), (0,), (2,))
    assert {expanded[lengths] for lengths in ((66,), (68,), (72,), (72,) * 16)} == {()}
    for cache, rows in zip(caches, before, strict=True):
        assert torch.equal(cache.rows, rows)


def test_a_later_stage_runs_on_what_an_earlier_one_carries(config):
    whole = build_runtime(torch.device("cpu"), torch.float32, 256)
    caches = page_pools(config, whole, 2, PAGE_SIZE, random=True)
    for stage in (PipelineStage(0, 1), PipelineStage(1)):
        runtime = replace(whole, pipeline=stage)
        model = random_model(config, runtime)
        run_batch(
            Batch((1, 20), 256), model, runtime, TABLE_WIDTH, lambda metadata: nullcontext(Step(metadata, caches))
        )


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """A small model."""
    return read_model_config(read_config_json(CHECKPOINT))


@pytest.fixture(scope="module")
def latents() -> ModelConfig:
    """A small model whose cache has latents."""
    sizes = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    names = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 6, "max_window_layers": None}
    return read_model_config({**read_config_json(CHECKPOINT), **sizes, **names, **experts})
