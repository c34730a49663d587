"""Our batches in vLLM's registry of what to compile before a server is ready."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

from atom_core.batch import BatchShape
from atom_core.kernels.select import KernelSet, Target
from atom_plugin.vllm import warmup
from atom_plugin.vllm.attention import VllmPagedAttention

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(block_size=16, mamba_cache_mode="align", mamba_block_size=48),
    compilation_config=SimpleNamespace(static_forward_context={}, fast_moe_cold_start=False),
    model_config=SimpleNamespace(max_model_len=200),
    parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, use_sequence_parallel_moe=False),
    num_speculative_tokens=3,
    use_v2_model_runner=True,
    scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
)


#: Whose kernels state no compile keys.
RUNTIME = SimpleNamespace(
    device=torch.device("cuda"),
    kernels=KernelSet(Target("cuda", "sm90"), ()),
    data_parallel=SimpleNamespace(world_size=1),
)
MIXER = SimpleNamespace(
    cache_spec=None, heads=(1, 16), query_dim=16, scale=1.0, attention_compile_keys=lambda shape, device: ()
)


class OneLayer(nn.Module):
    """What of a model is looked at here: its attention layers."""

    def __init__(self, cache=None):
        super().__init__()
        self.layer = VllmPagedAttention.__new__(VllmPagedAttention)
        nn.Module.__init__(self.layer)
        self.layer.layer_name, self.layer.kv_cache = "model.layers.0.self_attn.attn", cache
        self.layer.mixer = MIXER


def registered(device, cache=None, config=CONFIG):
    """A registry in which a model on `device` has been announced."""
    registry = JitWarmupRegistry(config)
    with registry.activate():
        model = OneLayer(torch.ones(1) if cache is None else cache)
        warmup.register_warm_up(model, SimpleNamespace(**{**vars(RUNTIME), "device": torch.device(device)}), config)
    return registry


def test_a_model_on_a_gpu_is_announced_and_one_on_a_cpu_is_not():
    assert len(registered("cuda")) == 1
    assert len(registered("cpu")) == 0


@pytest.mark.parametrize(("cache", "known"), [(torch.ones(1), True), (torch.tensor([]), False)])
def test_vllm_runs_every_batch_with_its_metadata_where_layers_look_for_it(cache, known, monkeypatch):
    seen = []

    batch = SimpleNamespace(num_tokens=3)

    def run_batch(shape, model, runtime, table_width, announce, states):
        with announce(batch):
            context = get_forward_context()
            assert context.dp_metadata is None
            seen.append((shape, table_width, context.attn_metadata))
        # Kernels are compiled for what the batches of layers with states have.
        assert states == warmup.StateKind(4, True, True, block_size=48)

    monkeypatch.setattr(warmup, "run_batch", run_batch)
    monkeypatch.setattr("vllm.distributed.is_global_first_rank", lambda: False)
    registered("cuda", cache).warmup()
    batches = warmup.batches_to_serve(OneLayer(), RUNTIME, 8, 64, 200, 4)
    assert [shape for shape, _, _ in seen] == batches
    assert BatchShape((1,) * 8, 200, decode_tokens=4) in batches
    expected = {"model.layers.0.self_attn.attn": batch} if known else None
    # 13 pages hold the longest request; vLLM's tables are as wide as a multiple of 128 tokens.
    assert all((table_width, given) == (16, expected) for _, table_width, given in seen)
    assert not is_forward_context_available()


def test_data_parallel_ranks_that_share_experts_know_what_each_other_brings(monkeypatch):
    """Else a server of several, on GPUs, ends while it warms up."""
    seen = []

    def run_batch(shape, model, runtime, table_width, announce, states):
        with announce(SimpleNamespace(num_tokens=sum(shape.queries))):
            seen.append((shape, get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()))

    monkeypatch.setattr(warmup, "run_batch", run_batch)
    monkeypatch.setattr("vllm.distributed.is_global_first_rank", lambda: False)
    parallel = SimpleNamespace(
        **{**vars(CONFIG.parallel_config), "data_parallel_size": 2, "data_parallel_rank": 1}, is_moe_model=True
    )
    registered("cuda", config=SimpleNamespace(**{**vars(CONFIG), "parallel_config": parallel})).warmup()
    assert [shape for shape, _ in seen] == warmup.batches_to_serve(OneLayer(), RUNTIME, 8, 64, 200, 4)
    assert all(counts == [sum(shape.queries)] * 2 for shape, counts in seen)


def test_a_model_built_outside_of_a_runner_is_announced_to_nobody():
    warmup.register_warm_up(OneLayer(torch.ones(1)), RUNTIME, CONFIG)
