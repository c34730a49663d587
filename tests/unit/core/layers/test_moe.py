"""A mixture in a layer, with the kernels for GPUs: what is fused answers as what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.config import MoEConfig, RoutingConfig
from atom_core.kernels import kernel_set
from atom_core.kernels.select import Implementation, Target, always
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.standalone import build_runtime

HIDDEN, SIZE = 48, 24
PLAIN = MoEConfig(RoutingConfig(6, 3, "softmax", renormalize=True), SIZE)
RUNTIME = build_runtime(torch.device("cpu"), torch.float32, 8)


def triton_runtime():
    from atom_core.kernels.experts.triton_kernel import TritonExperts

    experts = Implementation("framework", always, lambda spec, target: TritonExperts(spec, overlap=False))
    return replace(RUNTIME, kernels=kernel_set(Target("cpu", ""), contributed={"experts": experts}))


def mixture(config, runtime):
    torch.manual_seed(0)
    norm = RMSNorm(HIDDEN, 1e-5, runtime)
    layer = MoE(config, HIDDEN, "silu", norm, runtime, "mlp")
    for parameter in (*norm.parameters(), *layer.parameters()):
        parameter.data.normal_(0.0, 0.3)
    return layer


@pytest.mark.parametrize("pending", [False, True], ids=["summed up", "with something to add"])
@pytest.mark.parametrize("tokens", [1, 2, 20])
@pytest.mark.parametrize(
    "config",
    [PLAIN, replace(PLAIN, shared_size=16), replace(PLAIN, shared_size=16, float32_scores=True)],
    ids=["plain", "with a shared expert", "with scores in float32"],
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


def test_one_token_is_normed_and_added_within_its_kernels(monkeypatch):
    layer = mixture(PLAIN, triton_runtime())
    monkeypatch.setattr(layer.experts, "forward", None)
    monkeypatch.setattr(layer.experts, "add", None)
    residual = torch.randn(1, HIDDEN)
    stream = layer(Stream(None, residual))
    assert stream.last is None
    assert stream.residual is residual
