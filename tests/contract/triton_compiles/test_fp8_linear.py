"""Linear layers in FP8 with a scale a row, and their quantiser, compile for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.fp8_linear import one_row as fp8_row_kernel
from atom_core.kernels.fp8_linear import quantize as quantize_kernel
from atom_core.kernels.fp8_linear import triton_kernel as fp8_kernel
from atom_core.kernels.fp8_linear.scaled_mm import dtype_of
from atom_core.kernels.linear import triton_kernel as linear_kernel
from tests.contract.triton_compiles.compiling import (
    FRONTS,
    PRODUCTS,
    Launched,
    Recorders,
    compile_launch,
    compiles,
    every_gpu,
    in_front,
    zeros,
)

QUANTISED = [(size, way) for size in (1024, 12288) for way in FRONTS] + [
    (16384, "added and normed"),
    (16384, "activated"),
    (53248, "alone"),
]


@every_gpu
@pytest.mark.parametrize("input_scale", [None, torch.ones(1)], ids=["dynamic", "static"])
@pytest.mark.parametrize(("size", "way"), QUANTISED)
def test_quantising_activations_compiles(size, way, input_scale, gpu):
    x = zeros(2, 2 * size if way == "activated" else size)
    with compiles(quantize_kernel, "_quantize", gpu):
        quantize_kernel.quantize(x, input_scale, dtype_of(gpu.device), gpu.nvidia, in_front(way, size))


@every_gpu
@pytest.mark.parametrize("norm", [None, linear_kernel.Norm(zeros(4096), 1e-6)], ids=["alone", "normed"])
@pytest.mark.parametrize("out_features", [4096, 6144, 24576])
def test_one_row_in_fp8_compiles(out_features, norm, gpu):
    tile = fp8_row_kernel.tile_for(out_features, 4096)
    weight = torch.zeros(out_features, 4096, dtype=torch.uint8).view(dtype_of(gpu.device))
    with compiles(fp8_row_kernel, "_one_row", gpu):
        fp8_row_kernel.multiply_row(
            zeros(1, 4096),
            weight,
            torch.ones(out_features),
            None,
            tile=tile,
            native=gpu.nvidia,
            overlap=gpu.nvidia,
            norm=norm,
            activation="silu" if norm else None,
        )


@every_gpu
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [*(it for it in PRODUCTS if it[0] > 1), (2, 4096, 4096), (24, 4096, 4096), (40, 4096, 4096)],
)
def test_products_in_fp8_compile(monkeypatch, rows, out_features, in_features, gpu):
    kernels, recorders = linear_kernel._KERNELS, Recorders()
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    dtype = dtype_of(gpu.device)
    monkeypatch.setattr(
        fp8_kernel, "quantize", lambda x, *_: (torch.zeros_like(x, dtype=torch.uint8).view(dtype), torch.ones(rows, 1))
    )
    weight, scales = zeros(out_features, in_features).to(torch.float8_e4m3fn), torch.ones(out_features)
    kernel = fp8_kernel.TritonFp8Linear(gpu.device, gpu.nvidia)
    kernel.adopt(weight, scales)
    with pytest.raises(Launched) as launched:
        kernel(zeros(rows, in_features), weight, scales, None, None)
    compile_launch(kernels[recorders.asked], launched.value, gpu)
