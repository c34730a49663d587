"""Linear layers in 16 bits, with what surrounds them, compile for each GPU with the tiles chosen there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom_core.kernels import tuned
from atom_core.kernels.linear import triton_kernel as linear_kernel
from atom_core.kernels.linear.tiles import Tile, tile_for
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear import triton_kernel as normed_kernel
from atom_plugin.bench.tune import OP_FOLDER
from tests.contract.triton_compiles.compiling import (
    GPUS,
    PRODUCTS,
    Launched,
    Recorders,
    compile_launch,
    every_gpu,
    zeros,
)

#: What surrounds a product; all of it together compiles the most.
WAYS = [("plain", product) for product in PRODUCTS] + [
    (way, product) for way in ("adding", "normed and activated") for product in (PRODUCTS[0], PRODUCTS[5])
]

#: Of a router whose scores are float32.
WAYS += [(way, (rows, 64, 2048)) for way, rows in (("float32", 1), ("float32", 8), ("normed to float32", 1))]


@every_gpu
@pytest.mark.parametrize(("way", "product"), WAYS, ids=str)
def test_linear_compiles(monkeypatch, way, product, gpu):
    rows, out_features, in_features = product
    kernels, recorders = linear_kernel._KERNELS, Recorders()
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    monkeypatch.setattr(normed_kernel, "rms_norm", lambda x, *_, **__: (x, None))
    x, weight, residual = zeros(rows, in_features), zeros(out_features, in_features), zeros(rows, out_features)
    linear = linear_kernel.TritonLinear(gpu.nvidia, gpu.nvidia)
    normed = normed_kernel.TritonNormedLinear("silu", gpu.nvidia, gpu.nvidia)
    scores = linear_kernel.TritonLinear(gpu.nvidia, gpu.nvidia, float32_result=True)
    normed_scores = normed_kernel.TritonNormedLinear(None, gpu.nvidia, gpu.nvidia)
    launches = {
        "plain": lambda: linear(x, weight, None),
        "adding": lambda: linear.add(x, weight, None, residual),
        "normed and activated": lambda: normed(x, x[0], 1e-6, Operands(weight, None)),
        "float32": lambda: scores(x, weight, None),
        "normed to float32": lambda: normed_scores(x, x[0], 1e-6, Operands(weight, None, float32_result=True)),
    }
    with pytest.raises(Launched) as launched:
        launches[way]()
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("size", [(6144, 4096), (24576, 4096), (4096, 12288), (2048, 4096), (1024, 256)], ids=str)
@pytest.mark.parametrize("way", ["plain", "gelu_tanh", "clamped_swiglu", "FP8 and a residual"])
def test_products_for_hopper_compile(monkeypatch, way, size, rows):
    gpu, kernels, recorders = GPUS[-1], linear_kernel._KERNELS, Recorders()
    fp8 = way == "FP8 and a residual"
    tile = tile_for(rows, *size, 1 if fp8 else 2, nvidia=True, hopper=True)
    if tile is None:
        assert rows > 32
        return
    if rows == 1 and (fp8 or size == (1024, 256)):
        assert tile.kernel != "hopper"
        return
    assert tile.kernel == "hopper" or rows > 32
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    x, weight = zeros(rows, size[1]), zeros(*size)
    others: dict[str, Any] = {} if fp8 or way == "plain" else {"activation": way}
    if fp8:
        x, weight = (matrix.to(torch.float8_e4m3fn) for matrix in (x, weight))
        others = {"scales": torch.ones(size[0]), "input_scales": torch.ones(rows), "residual": zeros(rows, size[0])}
    with pytest.raises(Launched) as launched:
        linear_kernel.product(x, weight, None, tile=tile, overlap=True, dtype=torch.bfloat16, **others)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@pytest.mark.parametrize("rows", [64, 100, 256])
@pytest.mark.parametrize("size", [(4096, 1024), (1024, 2048), (2048, 2048), (6144, 1024), (128, 2048)], ids=str)
@pytest.mark.parametrize("way", ["plain", "silu", "adding", "in float32"])
def test_products_by_small_weights_for_hopper_compile(monkeypatch, way, size, rows):
    gpu, kernels, recorders = GPUS[-1], linear_kernel._KERNELS, Recorders()
    tile = tile_for(rows, *size, 2, nvidia=True, hopper=True)
    assert tile is not None
    assert tile.tokens or rows == 64
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    others: dict[str, Any] = {"activation": "silu"} if way == "silu" else {}
    if way == "adding":
        others = {"residual": zeros(rows, size[0])}
    if way == "in float32":
        others = {"dtype": torch.float32}
    with pytest.raises(Launched) as launched:
        linear_kernel.product(zeros(rows, size[1]), zeros(*size), None, tile=tile, overlap=True, **others)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


#: A product for each tile that comes with the package, all of them Hopper's.
TUNED = {Tile(**tile): shape for shape, tile in tuned.load(OP_FOLDER, "NVIDIA H200").items()}


@pytest.mark.parametrize(("tile", "shape"), TUNED.items(), ids=str)
def test_tuned_tiles_compile_for_hopper(monkeypatch, tile, shape):
    gpu, kernels, recorders = GPUS[-1], linear_kernel._KERNELS, Recorders()
    monkeypatch.setattr(linear_kernel, "_KERNELS", recorders)
    norm = Norm(zeros(shape.in_features), 1e-6) if tile.norms else None
    # A head's weight is large, and nobody reads it.
    weight = torch.empty(shape.out_features, shape.in_features, dtype=torch.bfloat16)
    with pytest.raises(Launched) as launched:
        linear_kernel.product(zeros(shape.rows, shape.in_features), weight, None, tile=tile, overlap=True, norm=norm)
    compile_launch(kernels[recorders.asked], launched.value, gpu)


@pytest.mark.parametrize("rows", [2, 16])
def test_products_of_an_odd_number_of_half_tiles_compile_for_hopper(monkeypatch, rows):
    test_products_for_hopper_compile(monkeypatch, "plain", (5120, 2880), rows)
