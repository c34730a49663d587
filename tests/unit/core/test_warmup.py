"""The batches that a model is warmed up with: of every kind, within the engine's limits, and without a trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atom_core.batch import BatchShape
from atom_core.cache import StateView
from atom_core.checkpoint import read_config_json
from atom_core.config import ModelConfig
from atom_core.kernels.select import Implementation, KernelSet, Op, Target, always
from atom_core.mixers.attention import AttentionMixer
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.runtime import PipelineStage
from atom_core.standalone import Step, build_runtime, empty_caches, random_model
from atom_core.warmup import StateKind, batch_of, batches_to_serve, batches_to_verify, run_batch

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "qwen3"
PAGE_SIZE, TABLE_WIDTH = 16, 24
CPU, HOPPER = Target("cpu", "x86_64"), Target("cuda", "sm90")


def batches_on(target, config, max_requests, max_tokens, max_seq_len):
    """Those of a model with the kernels that `target` has."""
    dtype = torch.float32 if target is CPU else torch.bfloat16
    runtime = build_runtime(torch.device("meta"), dtype, max_seq_len, target=target, with_aiter=False)
    model = load_model_class(config.architecture)(config, runtime)
    return batches_to_serve(model, runtime, max_requests, max_tokens, max_seq_len)


def runtime_with(*kernels, ranks=1):
    """What a model of these kernels was built with."""
    op = Op("linear", (Implementation("reference", always, lambda spec, target: kernels[spec]),))
    chosen = KernelSet(CPU, [op])
    for spec in range(len(kernels)):
        chosen.select(op, spec)
    return SimpleNamespace(kernels=chosen, device=torch.device("cpu"), data_parallel=SimpleNamespace(world_size=ranks))


@pytest.mark.parametrize(
    ("max_requests", "max_tokens", "max_seq_len"), [(1, 1, 1), (1, 64, 32), (4, 8, 4096), (200, 8192, 40960)]
)
def test_batches_are_within_the_limits_and_none_comes_twice(config, max_requests, max_tokens, max_seq_len):
    batches = batches_on(HOPPER, config, max_requests, max_tokens, max_seq_len)
    assert 0 < len(set(batches)) == len(batches) < 25
    for shape in batches:
        assert 1 <= len(shape.queries) <= max_requests
        assert sum(shape.queries) <= max_tokens
        assert max(shape.queries) + shape.cached <= shape.max_seq_len <= max_seq_len


def test_batches_are_of_every_kind_where_kernels_state_nothing(config):
    """As of libraries, which may compile as well."""
    batches = batches_on(CPU, config, 200, 8192, 40960)
    assert batches[0] == BatchShape((1,), 40960), "one request that decodes"
    assert BatchShape((1,) * 200, 40960) in batches, "as many as there may be"
    assert any(len(set(shape.queries)) == 2 for shape in batches), "decodes beside a prompt"
    assert any(len(shape.queries) == 1 < shape.num_tokens for shape in batches), "a prompt"
    assert len(batches) < 8


@pytest.mark.parametrize(
    ("max_seq_len", "prompts"), [(100, (*(100,) * 81, 92)), (2048, (2048,) * 4), (40960, (2048,) * 4)]
)
def test_as_many_tokens_as_there_may_be_are_prompts_of_lengths_that_there_may_be(config, max_seq_len, prompts):
    """However short requests are: experts of many tokens have kernels of their own."""
    batches = batches_on(CPU, config, 200, 8192, max_seq_len)
    assert [shape.queries for shape in batches if shape.num_tokens == 8192] == [prompts]


class Compiled:
    """A kernel whose tiles change where `changes` says."""

    def __init__(self, changes):
        self.changes = changes

    def compile_keys(self, shape, device):
        yield self.changes(shape)


@pytest.mark.parametrize(
    "changes",
    [
        lambda shape: shape.num_tokens > 777,
        lambda shape: (shape.num_tokens > 100, shape.num_tokens % 2),
        lambda shape: shape.num_requests // 50,
        lambda shape: min(shape.max_query_len, 9),
        lambda shape: shape.max_query_len == 1 and -(-shape.max_seq_len // 64) > 1,
        lambda shape: (shape.max_query_len > 16, shape.max_seq_len > shape.max_query_len),
    ],
)
def test_a_kernel_is_run_with_all_of_its_compile_keys(changes):
    """Whatever changes them, and wherever."""
    every = {changes(BatchShape((new,) * requests, 4096)) for new in range(1, 300) for requests in range(1, 201)}
    every |= {changes(BatchShape((new,), new)) for new in (1, 300)}
    batches = batches_to_serve(nn.Module(), runtime_with(Compiled(changes)), 200, 8192, 4096)
    assert {changes(shape) for shape in batches} == every
    assert len(batches) <= 5 + len(every)


def test_batches_that_show_one_kernel_its_keys_show_others_theirs():
    kernels = [Compiled(lambda shape, at=at: shape.num_tokens > at) for at in range(100, 200)]
    assert len(batches_to_serve(nn.Module(), runtime_with(*kernels), 200, 8192, 4096)) == 5


def test_experts_have_the_tokens_of_all_data_parallel_ranks():
    changes = lambda shape: shape.num_expert_tokens > 32  # noqa: E731
    runtime = runtime_with(Compiled(changes), ranks=4)
    batches = batches_to_serve(nn.Module(), runtime, 8, 8, 4096)
    assert {shape.data_parallel_size for shape in batches} == {4}
    assert {changes(shape) for shape in batches} == {False}
    batches = batches_to_serve(nn.Module(), runtime, 16, 16, 4096)
    assert {changes(shape) for shape in batches} == {False, True}


def test_layers_that_differ_in_their_place_alone_are_asked_once(config, monkeypatch):
    asked = set()
    keys = AttentionMixer.attention_compile_keys

    def ask(self, shape, device):
        asked.add(self.layer_index)
        return keys(self, shape, device)

    monkeypatch.setattr(AttentionMixer, "attention_compile_keys", ask)
    assert config.num_layers > 1
    batches_on(CPU, config, 2, 8, 16)
    assert len(asked) == 1


def test_a_batch_has_no_slots_and_only_the_first_page(config):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(config, runtime)
    batch = batch_of(BatchShape((1, 1, 40), 256), model, TABLE_WIDTH, runtime.device)
    assert batch.query_start_loc.tolist() == [0, 1, 2, 42]
    assert batch.seq_lens.tolist() == [1, 1, 40]
    behind = batch_of(BatchShape((2,), 256, 64), model, TABLE_WIDTH, runtime.device)
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


def test_a_hybrids_batch_has_states_in_no_slot():
    config = read_model_config(read_config_json(CHECKPOINT.with_name("qwen3_5")))
    runtime = build_runtime(torch.device("meta"), torch.float32, 256)
    model = load_model_class(config.architecture)(config, runtime)
    states = batch_of(BatchShape((1, 1, 40), 256), model, TABLE_WIDTH, torch.device("cpu")).states
    assert states.slots.tolist() == [[0]] * 3


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_requests_have_no_states_and_a_column_for_each_token_that_is_verified(num_drafts):
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    hybrid = read_model_config(read_config_json(CHECKPOINT.with_name("qwen3_5")))
    model = random_model(hybrid, runtime)
    kind = StateKind(1 + num_drafts, num_drafts > 0, num_drafts > 0)
    states = batch_of(BatchShape((1, 40), 256), model, TABLE_WIDTH, runtime.device, kind).states
    assert states.slots.tolist() == [[0] * (1 + num_drafts)] * 2
    assert (states.num_accepted is None) == (states.verifies is None) == (num_drafts == 0)
    caches = empty_caches(model, runtime, 2, PAGE_SIZE, 1)
    run_batch(BatchShape((1, 40), 256), model, runtime, TABLE_WIDTH, lambda it: nullcontext(Step(it, caches)), kind)
    linear = [cache for cache in caches.values() if isinstance(cache, StateView)]
    assert linear
    assert all(tensor.isnan().all() for cache in linear for tensor in cache.tensors)


def test_requests_in_front_with_as_many_tokens_as_are_verified_decode():
    shape = BatchShape((1, 4, 2, 40, 3), 256, decode_tokens=4)
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(read_model_config(read_config_json(CHECKPOINT.with_name("qwen3_5"))), runtime)
    batch = batch_of(shape, model, TABLE_WIDTH, runtime.device)
    assert (batch.num_decode_requests, batch.num_decode_tokens) == (3, 7)
    assert replace(shape, decode_tokens=1).num_decode_requests == 1


def test_copies_for_prefixes_are_asked_of_no_request():
    runtime = build_runtime(torch.device("cpu"), torch.float32, 256)
    model = random_model(read_model_config(read_config_json(CHECKPOINT.with_name("qwen3_5"))), runtime)
    states = batch_of(BatchShape((1, 40), 256), model, TABLE_WIDTH, runtime.device, StateKind(copies=True)).states
    assert (states.snapshots.slots.tolist(), states.snapshots.tokens.tolist()) == ([0, 0], [0, 0])
    assert states.verifies is None


def test_batches_that_verify_are_of_equal_requests_and_few():
    """By all keys of kernels over states: here by whether there are many requests."""
    runtime = build_runtime(torch.device("meta"), torch.bfloat16, 256, target=HOPPER, with_aiter=False)
    hybrid = load_model_class("Qwen3_5ForCausalLM")(
        read_model_config(read_config_json(CHECKPOINT.with_name("qwen3_5"))), runtime
    )
    found = batches_to_verify(hybrid, runtime, 200, 256, 4)
    assert all(set(shape.queries) == {4} for shape in found)
    assert len({shape.num_requests for shape in found}) == len(found) == 2
    assert batches_to_verify(nn.Module(), runtime, 200, 256, 4) == []


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

    batches = batches_on(HOPPER, config, 20, 512, 256)
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

    for shape in batches_on(HOPPER, latents, 20, 512, 256):
        run_batch(shape, model, runtime, TABLE_WIDTH, announce)
    assert {plan[:1] for plan in expanded.values()} >= {(), (0,), (2,)}
    assert {expanded[lengths] for lengths in expanded if max(lengths) - 64 <= 16} == {()}
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
