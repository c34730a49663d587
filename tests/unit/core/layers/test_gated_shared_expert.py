"""A shared expert with a gate, against Transformers' mixture of Qwen3-Next, on every path and on several ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from atom_core.config import ExpertNames, MoEConfig
from atom_core.fusion.linear import Stream, StreamNorm
from atom_core.fusion.moe import FusedMoE
from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm
from atom_core.layers.parameters import ParameterLayer
from atom_core.runtime import SingleRank
from atom_core.types import RoutingConfig
from atom_core.weights import slots_of
from tests.unit.core.layers.test_moe import RUNTIME, triton_runtime
from tests.unit.core.ranks import ThreadDataParallelRank, on_ranks

HIDDEN, EXPERTS, SIZE = 40, 8, 16
NAME = "model.layers.0.mlp"
GATE = f"{NAME}.shared_expert_gate.weight"
CONFIG = MoEConfig(
    RoutingConfig(EXPERTS, 3, "softmax", renormalize=True),
    SIZE,
    ExpertNames(shared="shared_expert"),
    shared_size=SIZE,
    shared_size_key="shared_expert_intermediate_size",
    shared_gate=True,
)
WIDER = replace(CONFIG, shared_size=2 * SIZE)
ROUTED, APART = {"shared_experts": "routed"}, {"shared_experts": "separate"}


def hugging_face(config, seed=0):
    """Transformers' mixture with random weights, and those as a published checkpoint of 3.5-MoE has them."""
    torch.manual_seed(seed)
    block = Qwen3NextSparseMoeBlock(
        AutoConfig.for_model(
            "qwen3_next",
            hidden_size=HIDDEN,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=SIZE,
            shared_expert_intermediate_size=config.shared_size,
        )
    )
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.3)
    tensors = {f"{NAME}.{name}": it.data for name, it in block.named_parameters()}
    assert {f"{NAME}.experts.gate_up_proj", GATE} <= set(tensors)
    return block, tensors


def one_by_one(tensors):
    """A tensor for each expert's matrix."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        matrices = {"down_proj": tensor}
        if name.endswith("gate_up_proj"):
            matrices = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
        for matrix, whole in matrices.items():
            found |= {f"{NAME}.experts.{index}.{matrix}.weight": each for index, each in enumerate(whole)}
    return found


def load(layer, tensors):
    slots = {
        name: slot
        for path, module in layer.named_modules()
        if isinstance(module, ParameterLayer)
        for name, slot in slots_of(f"{NAME}.{path}", module)
    }
    tensors, loaded = one_by_one(tensors), set()
    for name, slot in slots.items():
        assert slot.placement.problem(tuple(tensors[name].shape), "F32") is None
        slot.placement.load(tensors[name])
        loaded.add(name)
    for module in layer.modules():
        if isinstance(module, ParameterLayer):
            module.close_weights()
    return loaded


def on_cpu(forced):
    return replace(RUNTIME, kernels=kernel_set(Target("cpu", ""), forced))


def mixture(config, tensors, runtime):
    layer = MoE(config, HIDDEN, "silu", runtime, NAME, 0)
    load(layer, tensors)
    return layer


@torch.no_grad()
def wanted(block, x):
    return block(x[None])[0]


@torch.no_grad()
def fused(layer, runtime, x):
    """A layer that runs fused behind a norm that changes nothing of ``x``, without the residual."""
    norm = RMSNorm(HIDDEN, 0.0, runtime)
    norm.weight.data.fill_(1.0)
    stream = FusedMoE(StreamNorm(norm, runtime), layer, runtime)(Stream(None, x.clone()))
    total = stream.whole(runtime.tensor_parallel)
    return (total.residual if total.last is None else total.residual + total.last) - x


def unit_rows(tokens, seed=1):
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x / x.square().mean(-1, keepdim=True).sqrt()


assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
every_path = pytest.mark.parametrize("forced", [ROUTED, APART], ids=["routed", "apart"])
every_config = pytest.mark.parametrize("config", [CONFIG, WIDER], ids=["one size", "two sizes"])


@every_path
@every_config
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_it_is_hugging_faces(config, forced, tokens):
    block, tensors = hugging_face(config)
    x = unit_rows(tokens)
    plain = on_cpu(forced)
    layer = mixture(config, tensors, plain)
    assert (layer.shared_layer is None) == (forced is ROUTED)
    with torch.no_grad():
        assert_close(layer(x), wanted(block, x))
    assert_close(fused(layer, plain, x), wanted(block, x))
    triton = triton_runtime(**forced)
    assert_close(fused(mixture(config, tensors, triton), triton, x), wanted(block, x))


@every_path
def test_the_gate_matters(forced):
    block, tensors = hugging_face(CONFIG)
    x, runtime = unit_rows(5), triton_runtime(**forced)
    expected = wanted(block, x)
    changed = {**tensors, GATE: -tensors[GATE]}
    found = fused(mixture(CONFIG, changed, runtime), runtime, x)
    assert (found - expected).abs().max() > 0.1
    with torch.no_grad():
        block.shared_expert_gate.weight.neg_()
    assert_close(found, wanted(block, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["the model's dtype", "float32"])
@every_path
def test_the_gate_has_the_routers_dtype(dtype, wide, forced):
    config = replace(CONFIG, float32_router=wide)
    block, tensors = hugging_face(config)
    runtime = replace(on_cpu(forced), dtype=dtype)
    layer = mixture(config, tensors, runtime)
    weight = layer.gate.as_loaded()["weight"]
    assert weight.shape == (16, HIDDEN)
    assert not weight[EXPERTS + 1 :].any()
    assert weight.dtype == (torch.float32 if wide else dtype)
    assert torch.equal(weight[EXPERTS : EXPERTS + 1], tensors[GATE].to(weight.dtype))
    x = unit_rows(5).to(dtype)
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == dtype
    if dtype == torch.float32:
        assert_close(found, wanted(block, x))


def test_names_are_the_checkpoints():
    _, tensors = hugging_face(CONFIG)
    for forced in (ROUTED, APART):
        layer = MoE(CONFIG, HIDDEN, "silu", on_cpu(forced), NAME, 0)
        assert load(layer, tensors) == set(one_by_one(tensors))
    paths = {name for name, _ in layer.named_parameters()}
    assert {"gate.weight", "shared_expert.gate_up_proj.weight", "shared_expert.down_proj.weight"} <= paths


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
@every_path
def test_ranks_answer_as_one(expert_parallel, forced):
    block, tensors = hugging_face(CONFIG)
    x, runtime = unit_rows(9), on_cpu(APART if expert_parallel else forced)

    def run(group):
        own = replace(runtime, tensor_parallel=group, expert_parallel=expert_parallel)
        layer = mixture(CONFIG, tensors, own)
        with torch.no_grad():
            return layer(x), fused(layer, own, x)

    for answers in on_ranks(2, run):
        for found in answers:
            assert_close(found, wanted(block, x))


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
@every_path
def test_data_parallel_ranks_answer_as_one(expert_parallel, forced):
    block, tensors = hugging_face(CONFIG)
    runtime = on_cpu(APART if expert_parallel else forced)

    def run(group):
        group.__class__ = ThreadDataParallelRank
        x = unit_rows(4 + 3 * group.rank, seed=group.rank)
        group.count = len(x)
        own = replace(runtime, data_parallel=group, expert_parallel=expert_parallel)
        layer = mixture(CONFIG, tensors, own)
        with torch.no_grad():
            return x, layer(x), fused(layer, own, x)

    for x, *answers in on_ranks(2, run):
        for found in answers:
            assert_close(found, wanted(block, x))


@every_path
def test_the_routing_that_is_reported_is_without_it(forced):
    _, tensors = hugging_face(CONFIG)
    told = []
    runtime = replace(triton_runtime(**forced), routed_experts=lambda index, experts: told.append(experts))
    layer = mixture(CONFIG, tensors, runtime)
    for tokens in (1, 2, 17):
        fused(layer, runtime, unit_rows(tokens))
        layer(unit_rows(tokens))
    for experts in told:
        assert experts.shape[1] == 3
        assert int(experts.max()) < EXPERTS


def test_a_gate_that_the_checkpoint_quantises_is_refused():
    block = MoE(CONFIG, HIDDEN, "silu", RUNTIME, NAME, 0)
    placements = {f"{module}.{name}": it for module, name, it in block.gate.placements()}
    (gate,) = [it for name, it in placements.items() if "shared_expert_gate" in name]
    assert "names no quantisation of it" in gate.problem((1, HIDDEN), "F8_E4M3")


def test_ranks_that_cannot_share_it_name_its_key():
    config = replace(CONFIG, shared_size=20)
    says = "tensor parallel size 8 does not divide shared_expert_intermediate_size=20"
    with pytest.raises(ValueError, match=says):
        MoE(config, HIDDEN, "silu", replace(RUNTIME, tensor_parallel=SingleRank(world_size=8)), NAME, 0)
