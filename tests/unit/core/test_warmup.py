"""The batches that a model is warmed up with: of every kind, within the engine's limits, and without a trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from atom_core.checkpoint import read_config_json
from atom_core.config import ModelConfig
from atom_core.models.read_config import read_model_config
from atom_core.runtime import PipelineStage
from atom_core.standalone import Step, build_runtime, empty_caches, random_model
from atom_core.warmup import BatchShape, batches_to_serve, metadata_of, run_batch

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "qwen3"
PAGE_SIZE, TABLE_WIDTH = 16, 24


@pytest.mark.parametrize(
    ("max_requests", "max_tokens", "max_seq_len"), [(1, 1, 1), (1, 64, 32), (4, 8, 4096), (200, 8192, 40960)]
)
def test_batches_are_within_the_limits_and_none_comes_twice(max_requests, max_tokens, max_seq_len):
    batches = batches_to_serve(max_requests, max_tokens, max_seq_len)
    assert len(set(batches)) == len(batches) < 120
    for shape in batches:
        assert 1 <= len(shape.queries) <= max_requests
        assert sum(shape.queries) <= max_tokens
        assert max(shape.queries) + shape.cached <= shape.max_seq_len <= max_seq_len


def test_batches_are_of_every_kind():
    batches = batches_to_serve(200, 8192, 40960)
    assert BatchShape((1,), 40960) in batches, "one request that decodes"
    assert BatchShape((1,) * 200, 40960) in batches, "as many as there may be"
    assert {len(shape.queries) for shape in batches} >= {1, 2, 3, 8, 200}
    assert any(len(set(shape.queries)) == 2 for shape in batches), "decodes beside a prompt"
    prompts = {sum(shape.queries) for shape in batches if min(shape.queries) > 1}
    assert any(tokens % 16 == 0 for tokens in prompts)
    assert any(tokens % 2 for tokens in prompts)
    assert BatchShape((8,), 40960, 64) in batches, "a prompt that is cached but for a few tokens"
    assert {shape.max_seq_len for shape in batches if shape.queries == (1,)} >= {64, 4096, 40960}


@pytest.mark.parametrize(
    ("max_seq_len", "prompts"), [(100, (*(100,) * 81, 92)), (2048, (2048,) * 4), (40960, (2048,) * 4)]
)
def test_as_many_tokens_as_there_may_be_are_prompts_of_lengths_that_there_may_be(max_seq_len, prompts):
    """However short requests are: experts of many tokens have kernels of their own."""
    whole = [shape.queries for shape in batches_to_serve(200, 8192, max_seq_len) if sum(shape.queries) == 8192]
    assert whole == [prompts]


def test_a_batch_has_no_slots_and_only_the_first_page(config):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(config, runtime)
    batch = metadata_of(BatchShape((1, 1, 40), 256), model, TABLE_WIDTH, runtime.device)
    assert batch.query_start_loc.tolist() == [0, 1, 2, 42]
    assert batch.seq_lens.tolist() == [1, 1, 40]
    behind = metadata_of(BatchShape((2,), 256, 64), model, TABLE_WIDTH, runtime.device)
    assert (behind.seq_lens.tolist(), behind.host.lengths) == ([66], (66,))
    assert (batch.pages.slots == -1).all()
    assert not batch.pages.table.any()
    assert batch.pages.table.shape == (3, TABLE_WIDTH)
    assert (batch.num_decode_requests, batch.num_decode_tokens) == (2, 2)
    assert (batch.num_requests, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (
        3,
        42,
        40,
        256,
    )
    assert set(batch.plans) == {layer.self_attn.attn.mixer.plan_key() for layer in model.model.layers} - {None}


@pytest.mark.parametrize("kernels", [{}, {"attention": "reference", "qk_norm_rope_cache": "reference"}])
def test_all_of_them_run_and_leave_no_trace_in_the_cache(config, kernels):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256, kernels)
    model = random_model(config, runtime)
    caches = empty_caches(model, runtime, 2, PAGE_SIZE, random=True)
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches.values()]
    announced = []

    def announce(batch):
        announced.append(batch)
        return nullcontext(Step(batch, caches))

    batches = batches_to_serve(20, 512, 256)
    for shape in batches:
        run_batch(shape, model, runtime, TABLE_WIDTH, announce)
    assert len(announced) == len(batches)
    for cache, (key, value) in zip(caches.values(), before, strict=True):
        assert torch.equal(cache.key, key)
        assert torch.equal(cache.value, value)


def test_prompts_over_latents_are_expanded_and_decodes_and_few_tokens_behind_cached_ones_are_not(latents):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(latents, runtime)
    caches = empty_caches(model, runtime, 2, PAGE_SIZE, random=True)
    before = [cache.rows.clone() for cache in caches.values()]
    key = model.model.layers[0].self_attn.attn.mixer.plan_key()
    expanded = {}

    def announce(batch):
        plan = batch.plans[key]
        expanded[batch.host.lengths] = () if plan is None else plan.expanded
        return nullcontext(Step(batch, caches))

    for shape in batches_to_serve(20, 512, 256):
        run_batch(shape, model, runtime, TABLE_WIDTH, announce)
    assert (expanded[(1, 1)], expanded[(64,)], expanded[(1, 1, 64)]) == ((), (0,), (2,))
    assert {expanded[lengths] for lengths in ((66,), (68,), (72,), (72,) * 16)} == {()}
    for cache, rows in zip(caches.values(), before, strict=True):
        assert torch.equal(cache.rows, rows)


def test_a_later_stage_runs_on_what_an_earlier_one_carries(config):
    whole = build_runtime(torch.device("cpu"), torch.float32, 256)
    for stage in (PipelineStage(0, 1), PipelineStage(1)):
        runtime = replace(whole, pipeline=stage)
        model = random_model(config, runtime)
        step = partial(Step, caches=empty_caches(model, runtime, 2, PAGE_SIZE, random=True))
        run_batch(
            BatchShape((1, 20), 256), model, runtime, TABLE_WIDTH, lambda batch, step=step: nullcontext(step(batch))
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
