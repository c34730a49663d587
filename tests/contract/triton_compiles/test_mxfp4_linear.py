"""Linear layers in MXFP4, and what prepares their inputs, compile for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.linear import triton_kernel as linear_kernel
from atom_core.kernels.mxfp4_linear import few_rows as few_mxfp4_rows_kernel
from atom_core.kernels.mxfp4_linear import inputs as inputs_kernel
from atom_core.kernels.mxfp4_linear import many_rows as many_mxfp4_rows_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("norm", [None, linear_kernel.Norm(zeros(12288), 1e-6)], ids=["alone", "normed"])
@pytest.mark.parametrize("slots", [None, torch.zeros(2, dtype=torch.int32)], ids=["all rows", "rows of slots"])
@pytest.mark.parametrize(("rounds", "planes"), [(False, 2), (True, 4), (True, 1)])
@pytest.mark.parametrize("size", [2880, 12288])
def test_preparing_inputs_for_mxfp4_compiles(size, rounds, planes, slots, norm, gpu):
    with compiles(inputs_kernel, "_prepare", gpu):
        inputs_kernel.prepare(zeros(2, size), gpu.nvidia, rounds=rounds, planes=planes, norm=norm, slots=slots)


def in_mxfp4(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """``x``, blocks and scales."""
    packed = (torch.zeros(out_features, in_features // unit, dtype=torch.uint8) for unit in (2, 32))
    return zeros(rows, in_features).to(dtype), *packed


@every_gpu
@pytest.mark.parametrize("way", ["plain", "adding", "activated", "float32"])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 4096, 4096), (24, 4096, 12288), (64, 1000, 96)])
def test_few_rows_by_mxfp4_compile(rows, out_features, in_features, way, gpu):
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    with compiles(few_mxfp4_rows_kernel, "_few_rows", gpu):
        few_mxfp4_rows_kernel.multiply_few_rows(
            *in_mxfp4(rows, out_features, in_features, dtype),
            zeros(out_features),
            nvidia=gpu.nvidia,
            overlap=gpu.nvidia,
            activation="silu" if way == "activated" else None,
            residual=zeros(rows, out_features) if way == "adding" else None,
        )


@every_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "in_features"), [(80, 4096), (300, 4096), (3000, 4096), (3000, 96)])
def test_many_rows_by_mxfp4_compile(rows, in_features, dtype, gpu):
    with compiles(many_mxfp4_rows_kernel, "_many_rows", gpu):
        many_mxfp4_rows_kernel.multiply_many_rows(*in_mxfp4(rows, 4096, in_features, dtype), None, nvidia=gpu.nvidia)
