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
    ],
    ids=["Qwen3", "DeepSeek V3", "DeepSeek V3, one shared", "DeepSeek V2 Lite, two shared"],
)
def test_routing_compiles(spec, gpu):
    correction = torch.zeros(spec.num_experts) if spec.correction else None
    with compiles(routing_kernel, "_route", gpu):
        routing_kernel.route(zeros(3, spec.num_experts), correction, spec, gpu.nvidia)
