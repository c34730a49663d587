"""The routing of experts compiles for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.moe_routing import triton_kernel as routing_kernel
from atom_core.types import RoutingConfig
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize(
    "spec",
    [
        RoutingConfig(128, 8, "softmax", renormalize=True),
        RoutingConfig(256, 8, "sigmoid", True, True, 2.5, 8, 4),
        RoutingConfig(256, 8, "sigmoid", True, True, 2.5, 8, 4, shared=1),
        RoutingConfig(64, 6, "softmax", renormalize=False, shared=2),
        RoutingConfig(512, 10, "softmax", renormalize=True, shared=1, shared_gate=True),
        RoutingConfig(256, 8, "softmax", renormalize=True, shared_gate=True),
    ],
    ids=[
        "Qwen3",
        "DeepSeek V3",
        "DeepSeek V3, one shared",
        "DeepSeek V2 Lite, two shared",
        "Qwen3-Next, one shared with a gate",
        "Qwen3.5, a gate of a separate network",
    ],
)
def test_routing_compiles(spec, gpu):
    correction = torch.zeros(spec.num_experts) if spec.correction else None
    with compiles(routing_kernel, "_route", gpu):
        routing_kernel.route(zeros(3, spec.num_logits), correction, spec, gpu.nvidia)
