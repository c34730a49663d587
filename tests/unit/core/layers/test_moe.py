"""A mixture in a layer, with the kernels for GPUs: what is fused answers as what is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from atom_core.config import ExpertNames, MoEConfig
from atom_core.fusion.linear import Stream, StreamNorm
from atom_core.fusion.moe import FusedMoE
from atom_core.kernels import kernel_set
from atom_core.kernels.select import Implementation, Target, always
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm
from atom_core.standalone import build_runtime
from atom_core.types import RoutingConfig

HIDDEN, SIZE = 48, 24
PLAIN = MoEConfig(RoutingConfig(6, 3, "softmax", renormalize=True), SIZE)
#: Qwen3-Next's: a shared expert with a gate.
GATED = replace(
    PLAIN,
    shared_size=SIZE,
    shared_gate=True,
    shared_size_key="shared_expert_intermediate_size",
    names=ExpertNames(shared="shared_expert"),
)
RUNTIME = build_runtime(torch.device("cpu"), torch.float32, 8)


def triton_runtime(**forced):
    from atom_core.kernels.experts.triton_kernel import TritonExperts
    from atom_core.kernels.gated_sum.triton_kernel import gated_sum
    from atom_core.kernels.moe_routing.triton_kernel import route
    from atom_core.kernels.normed_router.triton_kernel import TritonNormedRouter

    experts = Implementation("framework", always, lambda spec, target: TritonExperts(spec, overlap=False))
    routing = Implementation("framework", always, lambda spec, target: partial(route, spec=spec, overlap=False))
    router = Implementation("framework", always, lambda spec, target: TritonNormedRouter(overlap=False))
    gated = Implementation("framework", always, lambda spec, target: partial(gated_sum, overlap=False))
    ours = {"experts": experts, "moe_routing": routing, "normed_router": router, "gated_sum": gated}
    kernels = kernel_set(Target("cpu", ""), forced, ours)
    return replace(RUNTIME, kernels=kernels)


def mixture(config, runtime):
    torch.manual_seed(0)
    norm = RMSNorm(HIDDEN, 1e-5, runtime)
    layer = MoE(config, HIDDEN, "silu", runtime, "mlp", 0)
    for parameter in (*norm.parameters(), *layer.parameters()):
        parameter.data.normal_(0.0, 0.3)
    return FusedMoE(StreamNorm(norm, runtime), layer, runtime)


@pytest.mark.parametrize("pending", [False, True], ids=["summed up", "with something to add"])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        replace(PLAIN, shared_size=16),
        replace(PLAIN, shared_size=16, float32_scores=True),
        replace(PLAIN, float32_router=True),
        replace(GATED, shared_size=16),
        replace(GATED, float32_router=True),
    ],
    ids=[
        "plain",
        "with a shared expert",
        "with scores in float32",
        "with a router in float32",
        "with a gated shared expert",
        "with a gate in float32",
    ],
)
def test_fused_kernels_leave_the_same_stream(config, tokens, pending):
    torch.manual_seed(1)
    residual, last = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN) if pending else None

    def after(layer):
        stream = layer(Stream(None if last is None else last.clone(), residual.clone()))
        return stream.residual if stream.last is None else stream.residual + stream.last

    fused = mixture(config, triton_runtime())
    assert fused.max_normed == 1
    torch.testing.assert_close(after(fused), after(mixture(config, RUNTIME)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 20])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("base", [PLAIN, GATED], ids=["plain", "gated"])
def test_shared_experts_among_the_routed_ones_leave_the_same_stream(tokens, count, base):
    config = replace(base, routing=replace(base.routing, top_k=4), shared_size=count * SIZE)
    apart = mixture(config, RUNTIME)
    routed = mixture(config, triton_runtime(shared_experts="routed"))
    routed.router.weight.data.copy_(apart.router.weight)
    routed.norm.weight.data.copy_(apart.norm.weight)
    gates, ups = apart.moe.shared_layer.gate_up_proj.weight.view(2, count, SIZE, HIDDEN)
    downs = apart.moe.shared_layer.down_proj.weight.view(HIDDEN, count, SIZE).transpose(0, 1)
    ours, theirs = routed.experts, apart.experts
    ours.gate_up_proj.data.copy_(torch.cat([theirs.gate_up_proj, torch.cat([gates, ups], 1)]))
    ours.down_proj.data.copy_(torch.cat([theirs.down_proj, downs]))
    residual = torch.randn(tokens, HIDDEN)
    found, wanted = (layer(Stream(None, residual.clone())) for layer in (routed, apart))
    assert found.last is None
    expected = wanted.residual if wanted.last is None else wanted.residual + wanted.last
    torch.testing.assert_close(found.residual, expected, rtol=1e-4, atol=1e-4)


def test_one_token_is_normed_and_added_within_its_kernels(monkeypatch):
    layer = mixture(PLAIN, triton_runtime())
    monkeypatch.setattr(layer.experts, "forward", None)
    monkeypatch.setattr(layer.experts, "add", None)
    residual = torch.randn(1, HIDDEN)
    stream = layer(Stream(None, residual))
    assert stream.last is None
    assert stream.residual is residual


@pytest.mark.parametrize("tokens", [2, 16])
def test_few_tokens_are_normed_within_their_router(monkeypatch, tokens):
    layer = mixture(PLAIN, triton_runtime())
    monkeypatch.setattr(layer, "norm", SimpleNamespace(weight=layer.norm.weight, eps=layer.norm.eps))
    monkeypatch.setattr(layer.router, "forward", None)
    residual = torch.randn(tokens, HIDDEN)
    assert layer(Stream(None, residual)).residual is residual
