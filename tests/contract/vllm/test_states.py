"""Layers with states (Gated DeltaNet) over memory that vLLM makes, and what our builder says of each kind of step."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states import mamba_hybrid

from atom_core.cache import StateSpec
from atom_core.kernels.gated_delta_net.triton_decode import MAX_TOKENS
from atom_core.mixers.base import TokenMixer
from atom_core.standalone import build_runtime
from atom_plugin.common.states import MOST_DRAFTS
from atom_plugin.vllm.attention import VllmLinearAttention
from atom_plugin.vllm.hybrid_model_state import AtomHybridModelState
from atom_plugin.vllm.states import state_dtypes

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "qwen3"
NAME = "model.layers.0.linear_attn.attn"
ROWS, CHANNELS, STATE = 3, 8, (2, 4, 4)
BLOCK = 32


class Marking(TokenMixer):
    """A mixer over states that writes 1 where it may write and adds what it finds to its output."""

    graph_support = "decodes"

    @property
    def cache_spec(self):
        return StateSpec(((ROWS, CHANNELS), STATE), (torch.bfloat16, torch.float32))

    def select_kernels(self, kernels):
        pass

    def scaled(self, cache):
        return cache

    def run(self, inputs, positions, batch, cache, out):
        out.zero_()
        conv, state = cache.tensors
        for slots in slots_of(batch):
            if slots[0] > 0:
                conv[slots[0], :ROWS], state[slots[0]] = 1.0, 1.0


def slots_of(batch):
    """The slots of each request, as kernels find them; zeros where no token is."""
    new = batch.query_start_loc.diff()
    return (batch.states.slots_of(batch.seq_lens) * (new > 0)[:, None]).tolist()


def has_state(batch):
    """Whether each request has one, as kernels find it."""
    return (batch.seq_lens > batch.query_start_loc.diff()).tolist()


def layer_of(drafts=0, mode="none", graphs="decodes"):
    """A layer and vLLM's configuration."""
    model = ModelConfig(str(CHECKPOINT), dtype="bfloat16")
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            prompt_lookup_max=4,
            num_speculative_tokens=drafts,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    scheduler = SchedulerConfig(max_num_seqs=8, max_model_len=model.max_model_len, is_encoder_decoder=False)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK),
        speculative_config=speculative,
        scheduler_config=scheduler,
    )
    config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size = mode, BLOCK
    mixer = Marking(NAME, 0, (2, 4), 4, 1.0)
    mixer.graph_support = graphs
    runtime = build_runtime(torch.device("cpu"), torch.bfloat16, 256)
    with set_current_vllm_config(config):
        return VllmLinearAttention(mixer, runtime), config


def builder_of(drafts=0, mode="none", graphs="decodes", is_v1=False):
    """A builder for one of vLLM's model runners; V2 itself wants Triton."""
    layer, config = layer_of(drafts, mode, graphs)
    spec = layer.get_kv_cache_spec(config)
    layer.bind_kv_cache(torch.zeros(101, 1, 1, spec.page_size_bytes, dtype=torch.int8))
    builder = layer.get_attn_backend().get_builder_cls()(spec, [NAME], config, torch.device("cpu"))
    assert builder.is_v1
    builder.is_v1 = is_v1
    return builder


def step(requests, padded=0, width=8):
    """vLLM's metadata of `requests`, each (computed before, new tokens, prompt), and `padded` rows.

    Request r has the blocks 10 r + 1, 10 r + 2, ...
    """
    new = [it[1] for it in requests] + [0] * padded
    lengths = [it[0] + it[1] for it in requests] + [0] * padded
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = 10 * torch.arange(len(new), dtype=torch.int32)[:, None] + torch.arange(1, 1 + width, dtype=torch.int32)
    table[len(requests) :] = 0
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
        is_prefilling=torch.tensor([before < prompt for before, _, prompt in requests] + [False] * padded),
    )


def test_a_slot_is_what_vllm_counts_and_copies():
    for drafts in (0, 3):
        layer, config = layer_of(drafts)
        spec = layer.get_kv_cache_spec(config)
        rows = (ROWS + drafts) * CHANNELS * 2
        assert spec.page_size_bytes == rows + prod(STATE) * 4
        assert spec.num_speculative_blocks == drafts


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_states_are_written_where_vllm_has_them_and_padding_nowhere(layout, drafts, monkeypatch):
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    layer, config = layer_of(drafts)
    spec = layer.get_kv_cache_spec(config)
    pages = torch.full((24, 1, 1, spec.page_size_bytes + 64), -1, dtype=torch.int8)  # other layers' bytes lie between
    layer.bind_kv_cache(pages[..., : spec.page_size_bytes])
    batch = builder_of(drafts).build(0, step([(0, 2, 5), (0, 1, 1)], padded=1))
    with override_forward_context(create_forward_context({NAME: batch}, config)):
        layer((torch.zeros(3, 8),), torch.arange(3))
    conv = layer.kv_cache[0]
    assert conv.shape[1:] == ((CHANNELS, ROWS + drafts) if layout == "DS" else (ROWS + drafts, CHANNELS))
    view = layer.cache().tensors
    assert view[0].shape[1:] == (ROWS + drafts, CHANNELS)
    for slot in range(24):
        written = slot in (1, 11)
        assert (view[0][slot, :ROWS] == 1).all() == written
        assert (view[1][slot] == 1).all() == written
    assert (pages[..., spec.page_size_bytes :] == -1).all()
    assert (pages[0] == -1).all()


def test_a_run_without_a_step_touches_nothing():
    layer, config = layer_of()
    with override_forward_context(create_forward_context(None, config)):
        assert not layer((torch.ones(3, 8),), torch.arange(3)).any()


def test_graphs_replay_what_the_mixer_says():
    assert issubclass(type(builder_of()), GDNAttentionMetadataBuilder), "runners give accepted tokens to no other"
    assert builder_of().get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    assert builder_of(graphs="none").get_cudagraph_support(None, None) == AttentionCGSupport.NEVER


#: (computed before, new tokens, prompt) of each request, and whether it has a state.
STEPS = {
    "a prompt": ([(0, 5, 5)], [False]),
    "its first chunk of one token": ([(0, 1, 5)], [False]),
    "a prompt of one token": ([(0, 1, 1)], [False]),
    "a later chunk": ([(3, 2, 7)], [True]),
    "its last token": ([(4, 1, 5)], [True]),
    "decodes": ([(5, 1, 5), (9, 1, 5)], [True, True]),
    "decodes, a chunk, a new prompt": ([(5, 1, 5), (4, 3, 9), (0, 6, 6)], [True, True, False]),
    "decodes and a new prompt of one token": ([(5, 1, 5), (0, 1, 1)], [True, False]),
    "a resumed request's own tokens": ([(7, 6, 5)], [True]),
}


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_state_is_read_only_where_tokens_were_computed(name, padded):
    requests, expected = STEPS[name]
    batch = builder_of().build(0, step(requests, padded))
    assert has_state(batch) == expected + [False] * padded
    assert slots_of(batch) == [[10 * row + 1] for row in range(len(requests))] + [[0]] * padded
    assert batch.states.num_accepted is batch.states.verifies is batch.states.snapshots is None
    assert batch.num_tokens == sum(new for _, new, _ in requests)


@pytest.mark.parametrize("drafts", [0, 2])
def test_with_prefix_caching_slots_go_on_from_the_newest_block(drafts):
    requests = [(0, 1, 5), (BLOCK - 1, 1, 5), (BLOCK, 1, 5), (2 * BLOCK + 3, BLOCK - 3, 200)]
    batch = builder_of(drafts, "align").build(0, step(requests, padded=1))
    newest = [0, 0, 1, 2]
    columns = range(1 + drafts)
    expected = [[10 * row + 1 + block + it for it in columns] for row, block in enumerate(newest)]
    assert slots_of(batch) == [*expected, [0] * (1 + drafts)]


#: (computed before, new tokens, prompt), tokens accepted of the last step, and drafts of this one as vLLM says it;
#: whether the request verifies, and what counts as accepted.
VERIFIED = {
    "drafts": ((9, 4, 5), 3, 3, True, 3),
    "fewer drafts": ((9, 2, 5), 2, 1, True, 2),
    "no drafts after accepted ones": ((9, 1, 5), 3, 0, True, 3),
    "the same on vLLM 0.30 and 0.31": ((9, 1, 5), 3, -1, True, 3),
    "the first token after a prompt": ((5, 1, 5), 1, -1, True, 1),
    "a prompt": ((0, 5, 5), 1, -1, False, 1),
    "a prompt in a row that another request had": ((0, 5, 5), 4, -1, False, 1),
    "a prompt as long as drafts": ((0, 4, 4), 1, -1, False, 1),
    "its last tokens, as many as drafts": ((8, 4, 12), 1, -1, False, 1),
    "a last token": ((11, 1, 12), 1, -1, False, 1),
    "a resumed request's own tokens": ((12, 4, 5), 1, -1, False, 1),
    "a row that counts nothing": ((9, 4, 5), 0, 3, True, 1),
}


@pytest.mark.parametrize("padded", [0, 2])
def test_drafts_are_verified_row_by_row(padded):
    rows = sorted(VERIFIED.values(), key=lambda it: it[0][1])  # decodes first, as runners order them
    accepted = torch.tensor([it[1] for it in rows] + [1] * padded, dtype=torch.int32)
    drafts = torch.tensor([it[2] for it in rows] + [-1] * padded, dtype=torch.int32)
    builder = builder_of(3)
    assert builder.reorder_batch_threshold == 4
    for at in range(0, len(rows), 6):  # as many as there may be requests, with padding
        found = builder.build(
            0,
            step([it[0] for it in rows[at : at + 6]], padded),
            num_accepted_tokens=torch.cat((accepted[at : at + 6], accepted[len(rows) :])),
            num_decode_draft_tokens_cpu=torch.cat((drafts[at : at + 6], drafts[len(rows) :])),
        ).states
        assert found.verifies.tolist() == [it[3] for it in rows[at : at + 6]] + [False] * padded
        assert found.num_accepted.tolist() == [it[4] for it in rows[at : at + 6]] + [1] * padded


def test_the_older_runner_forgets_what_was_accepted_of_a_request_that_a_step_leaves_out():
    builder = builder_of(3, is_v1=True)
    #: Of each step: rows of (request, computed before, new tokens, drafts or -1), and what counts as accepted.
    steps = [
        ([(0, 0, 8, -1), (1, 0, 5, -1)], [1, 1]),  # two prompts, the first of them in two chunks
        ([(1, 5, 1, -1), (0, 8, 2, -1)], [1, 1]),  # without drafts yet
        ([(1, 6, 4, 3), (0, 10, 4, 3)], [1, 1]),
        ([(0, 13, 4, 3)], [3]),
        ([(0, 14, 4, 3), (1, 10, 4, 3)], [1, 4]),  # request 1 was left out
        ([(1, 11, 1, 0), (0, 16, 2, 1)], [1, 2]),
        ([(0, 18, 1, 0), (1, 12, 4, 3)], [2, 1]),
        ([(1, 13, 4, 3), (2, 0, 4, -1)], [1, 1]),
        ([(1, 15, 1, None), (2, 4, 1, None)], [2, 1]),  # up to 0.31, of a step without drafts
    ]
    prompts = [10, 5, 4]
    for rows, expected in steps:
        common = step([(before, new, prompts[request]) for request, before, new, _ in rows])
        common.block_table_tensor = 10 * torch.tensor([it[0] for it in rows])[:, None] + torch.arange(1, 5)
        common.block_table_tensor = common.block_table_tensor.int()
        told: tuple[torch.Tensor, ...] = ()
        if rows[0][3] is not None:
            told = torch.ones(len(rows), dtype=torch.int32), torch.tensor([it[3] for it in rows], dtype=torch.int32)
        assert builder.build(0, common, *told).states.num_accepted.tolist() == expected


def test_the_older_runner_leaves_a_prompt_padded_with_drafts_behind_longer_ones():
    """Nothing is verified there: the state after its one token is a copy, and that after the padding goes elsewhere."""
    builder = builder_of(2, is_v1=True)
    common = step([(9, 3, 5), (0, 7, 7), (0, 3, 1)])
    batch = builder.build(0, common, torch.ones(3, dtype=torch.int32), torch.tensor([2, -1, 2], dtype=torch.int32))
    states = batch.states
    assert batch.num_decode_requests == 1
    assert states.verifies.tolist() == [True, False, False]
    assert slots_of(batch) == [[1, 2, 3], [11, 12, 13], [22, 22, 23]]
    assert (states.snapshots.slots.tolist(), states.snapshots.tokens.tolist()) == ([0, 0, 21], [0, 0, 1])
    assert common.block_table_tensor[2, 0] == 21
    then = step([(10, 3, 5), (7, 3, 7), (1, 3, 1)])
    states = builder.build(0, then, torch.ones(3, dtype=torch.int32), torch.full((3,), 2, dtype=torch.int32)).states
    assert states.verifies.all()
    assert states.num_accepted.tolist() == [1, 1, 1]
    assert states.snapshots is None


def test_a_run_of_no_request_has_the_tensors_that_a_graph_reads():
    builder = builder_of(3)
    common = step([(0, 4, 0)] * 2)
    captured = builder.build_for_cudagraph_capture(common).states
    assert captured.verifies.all()
    dummy = builder.build(0, common).states
    assert not dummy.verifies.any()
    served = builder.build(
        0, step([(9, 4, 5), (0, 4, 4)]), torch.tensor([2, 1]).int(), torch.tensor([3, -1]).int()
    ).states
    for name in ("num_accepted", "verifies"):
        places = {getattr(it, name).data_ptr() for it in (captured, dummy, served)}
        assert len(places) == 1, f"{name} must stay where a graph reads it"
    assert captured.verifies.tolist() == [True, False], "a prompt's last tokens are no drafts, whatever the graph"


def test_the_newer_runner_says_which_prompts_are_padded_with_drafts(monkeypatch):
    """One of one token that comes while others verify; what stands for no draft must not stay in its state."""
    requests = [(9, 4, 5), (0, 4, 1), (0, 4, 4), (8, 4, 12)]
    drafts, common = np.array([3, 3, 0, 0], dtype=np.int32), step(requests)
    before, new, prompts = (np.array(it) for it in zip(*requests, strict=True))
    known = {
        "num_reqs": len(requests),
        "num_tokens": int(new.sum()),
        "idx_mapping": torch.arange(len(requests)),
        "num_scheduled_tokens": new,
        "num_draft_tokens_per_req": drafts,
        "query_start_loc_np": common.query_start_loc_cpu.numpy(),
        "seq_lens_cpu_upper_bound": common.seq_lens_cpu_upper_bound,
        "is_prefilling_np": before < prompts,
        "prefill_runs_as_decode_np": (before < prompts) & (new - drafts == 1) & (before > 0),
    }
    batch = InputBatch(**{field.name: known.get(field.name) for field in fields(InputBatch)})
    state = AtomHybridModelState.__new__(AtomHybridModelState)
    state.vllm_config = layer_of(3)[1]
    state.num_accepted_tokens_gpu = torch.tensor([2, 1, 1, 1], dtype=torch.int32)
    state._align_mode, state.recoverssm = False, None
    told = {}
    monkeypatch.setattr(mamba_hybrid, "build_attn_metadata", lambda **given: told.update(given))
    state.prepare_attn(batch, CUDAGraphMode.NONE, (), None, [], None)
    said = told["model_specific_attn_metadata"]
    common.is_prefilling = said.is_prefilling
    found = builder_of(3).build(0, common, said.num_accepted_tokens, said.num_decode_draft_tokens_cpu).states
    assert found.verifies.tolist() == [True, True, False, False]
    assert found.num_accepted.tolist() == [2, 1, 1, 1]


def test_so_many_drafts_are_served_as_kernels_verify():
    assert MOST_DRAFTS + 1 == MAX_TOKENS


def test_another_group_of_layers_has_its_own_slots():
    first, second = builder_of(2, "align"), builder_of(2, "align")
    common = step([(BLOCK, 3, 5), (0, 2, 2)], padded=1)
    batch = first.build(0, common, torch.tensor([2, 1, 1]).int(), torch.tensor([2, -1, -1]).int())
    other = second.update_block_table(batch, common.block_table_tensor + 100 * (common.block_table_tensor > 0), None)
    assert slots_of(other) == [[102, 103, 104], [111, 112, 113], [0, 0, 0]]
    assert slots_of(batch) == [[2, 3, 4], [11, 12, 13], [0, 0, 0]]
    assert replace(other.states, slots=batch.states.slots) == batch.states


class TorchOps(TorchDispatchMode):
    """Counts torch ops but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or result.untyped_storage().data_ptr() not in {
            it.untyped_storage().data_ptr() for it in args if isinstance(it, torch.Tensor)
        }:
            self.names.append(str(func))
        return result


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_where_states_lie_is_read_from_vllm_s_own_table_without_a_torch_op(drafts, mode):
    """Each op costs the host of a GPU some 20 us a step, and a group of layers; a graph reads the table at replay."""
    first, second = builder_of(drafts, mode), builder_of(drafts, mode)
    common = step([(9, 1 + drafts, 5), (12, 1 + drafts, 5)], padded=1)
    told = (torch.tensor([2, 1, 1]).int(), torch.tensor([2, 2, -1]).int()) if drafts else ()
    batch = first.build(0, common, *told)
    with TorchOps() as ops:
        other = second.update_block_table(batch, common.block_table_tensor, None)
        if not drafts:
            batch = first.build(0, common)
    assert ops.names == []
    for states in (batch.states, other.states):
        assert states.slots.data_ptr() == common.block_table_tensor.data_ptr()
        assert states.num_slots == 1 + drafts
    assert other.scratch is not batch.scratch


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (torch.bfloat16, torch.bfloat16)),
        ({"mamba_ssm_cache_dtype": "float32"}, (torch.bfloat16, torch.float32)),
        ({"mamba_cache_dtype": "float32"}, (torch.float32, torch.float32)),
    ],
)
def test_states_have_the_dtype_of_the_flags(flags, expected):
    _, vllm_config = layer_of()
    for name, value in {"mamba_ssm_cache_dtype": "auto", **flags}.items():
        setattr(vllm_config.cache_config, name, value)
    assert state_dtypes(vllm_config) == expected
