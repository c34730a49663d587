"""Products with FP8 weights in blocks on this GPU, against float64, with NaN around whatever must not be read."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups as launch
from atom_core.kernels.fp8_block_linear.reference import ReferenceFp8BlockLinear, quantize_groups
from atom_core.kernels.fp8_block_linear.triton_kernel import TritonFp8BlockLinear
from atom_core.kernels.fp8_linear.one_row import multiply_row
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, dtype_of
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS, Tile
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps

GPU = torch.device("cuda")
TARGET = Target.of(GPU)
OVERLAP = overlaps(TARGET)
FP8 = dtype_of(TARGET)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)

#: As a share of the answer's largest magnitude. FP8 products sum in fewer bits than float32 (some 13 on Hopper) within
#: a group of 128, and in float32 beyond.
FEWER_BITS = 2**-7

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048), (12288, 2048), (36864, 512)]
#: Of a last block that is smaller, and of less than one.
EDGES = [(16, 16), (48, 80), (144, 1008), (528, 4112)]
#: Of DeepSeek V3: a last block that is smaller, and on 8 GPUs groups that are no multiple of four.
WHOLE_GROUPS = [(2112, 7168), (7168, 2304)]
#: Fewer outputs than a tile has, and fewer steps than a pipeline.
FEW_TILES = [(48, 256), (200, 128)]
ROWS = [1, 3, 8, 16, 17, 40, MAX_ROWS]


def operands(rows, out_features, in_features, dtype):
    """Rows of x have a gap of NaN after them, as a slice of a wider buffer has; scales differ by up to 16 times."""
    torch.manual_seed(0)
    groups, blocks = -(-in_features // 128), -(-out_features // 128)
    wide = torch.full((rows, in_features + 8), float("nan"), dtype=dtype, device=GPU)
    sizes = torch.logspace(-2, 2, groups, 2, device=GPU).repeat_interleave(128)[:in_features]
    wide[:, :in_features] = torch.randn(rows, in_features, device=GPU) * sizes
    weight = torch.randn(out_features, in_features, device=GPU).mul_(100).clamp_(-448, 448).to(E4M3)
    weight.view(torch.uint8).view(-1)[::37] = 0x80  # minus zeros
    scale = torch.exp2(4 * torch.rand(blocks, groups, device=GPU)) / (400 * in_features**0.5)
    return wide[:, :in_features], weight, scale, torch.randn(out_features, device=GPU).to(dtype)


def expected(x, weight, weight_scale, bias, quantised=True):
    size, left = x.shape[1], x.double()
    if quantised:
        stored, scale = quantize_groups(x)
        left = stored.double() * scale.double().repeat_interleave(128, 1)[:, :size]
    wide = weight_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), :size]
    y = left @ (weight.double() * wide).T
    return y if bias is None else y + bias.double()


def expected_of_ours(x, *others):
    """One row is not quantised on NVIDIA's GPUs."""
    return expected(x, *others, quantised=TARGET.kind != "cuda" or len(x) != 1)


def assert_close(found, wanted, tolerance=FEWER_BITS):
    assert found.shape == wanted.shape
    atol = tolerance * wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=atol)


def triton(weight, scale):
    kernel = TritonFp8BlockLinear(TARGET, OVERLAP)
    kernel.adopt(weight, scale)
    return kernel


@every_dtype
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES + EDGES + WHOLE_GROUPS + FEW_TILES)
@pytest.mark.parametrize("rows", [0, *ROWS, MAX_ROWS + 1, 140, 515])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product(with_bias, rows, out_features, in_features, dtype):
    x, weight, scale, bias = operands(rows, out_features, in_features, dtype)
    bias = bias if with_bias else None
    assert_close(triton(weight, scale)(x, weight, scale, bias), expected_of_ours(x, weight, scale, bias))
    if rows:
        assert_close(ReferenceFp8BlockLinear()(x, weight, scale, bias), expected(x, weight, scale, bias))


@every_dtype
@pytest.mark.parametrize(("out_features", "in_features"), [*SHAPES, (256, 80), (512, 4112)])
@pytest.mark.parametrize("rows", ROWS)
def test_norm_activation_and_residual_around_it(rows, out_features, in_features, dtype):
    x, weight, scale, bias = operands(rows, out_features, in_features, dtype)
    kernel = triton(weight, scale)
    norm = torch.rand(in_features, device=GPU).to(dtype)
    normed = rms_norm(x, norm, 1e-6, None)[0]
    wanted = gated_activation(expected_of_ours(normed, weight, scale, bias).to(dtype), "silu")
    fused = TritonNormedLinear("silu", nvidia=TARGET.kind == "cuda", overlap=OVERLAP)
    layer = Operands(kernel.stored(weight), bias, scale)
    assert_close(fused(x, norm, 1e-6, layer), wanted.double(), 2 * FEWER_BITS)
    residual = torch.randn(rows, out_features, device=GPU).to(dtype)
    wanted = residual.double() + expected_of_ours(x, weight, scale, bias)
    found = kernel.add(x, weight, scale, bias, residual)
    assert found is residual
    assert_close(found, wanted)


@every_dtype
@pytest.mark.parametrize("size", [16, 1000, 4096, 12288, 29568])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_groups_are_quantised_as_the_reference_does(rows, size, dtype):
    x = operands(rows, 16, size, dtype)[0]
    x[0, :2] = torch.tensor([9e3, -9e3], dtype=dtype)
    if rows > 1:
        x[1] = 0
    unit = 2 if FP8 == FNUZ else 1
    found, scales = launch(x, FP8, OVERLAP, group=128)
    wanted, wanted_scales = quantize_groups(x)
    assert torch.equal(unit * found.float(), wanted.float())
    assert torch.equal(scales.T, unit * unit * wanted_scales)


@pytest.mark.parametrize("sizes", [(48, 80), (64, 256)], ids=str)
@pytest.mark.parametrize("rows", [20, 100, 101])
def test_a_row_with_nan_is_nan_and_its_neighbours_are_not(rows, sizes):
    x, weight, scale, _ = operands(rows, *sizes, torch.bfloat16)
    x[3, 5] = float("nan")
    y = triton(weight, scale)(x, weight, scale, None)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4, 19]].isfinite().all()


def test_one_row_with_nan_is_nan():
    x, weight, scale, _ = operands(1, 48, 80, torch.bfloat16)
    x[0, 5] = float("nan")
    assert triton(weight, scale)(x, weight, scale, None).isnan().all()


@every_dtype
@pytest.mark.parametrize(
    "tile", [(4, 256, 2), (8, 512, 2), (16, 512, 4), (8, 1024, 4), (32, 512, 8), (16, 2048, 8)], ids=str
)
@pytest.mark.parametrize(("out_features", "in_features"), [(5120, 2048), (2048, 4096), (544, 4112)])
@pytest.mark.skipif(not OVERLAP, reason="one row is a launch by itself on NVIDIA's GPUs")
def test_one_row_by_any_tile(tile, out_features, in_features, dtype):
    x, weight, scale, bias = operands(1, out_features, in_features, dtype)
    rows, columns, warps = tile
    way = {"tile": Tile("row", rows, columns, warps, early=True), "block": 128, "native": True, "overlap": OVERLAP}
    assert_close(multiply_row(x, weight, scale, bias, **way), expected_of_ours(x, weight, scale, bias))
    norm = torch.rand(in_features, device=GPU).to(dtype)
    wanted = expected_of_ours(rms_norm(x, norm, 1e-6, None)[0], weight, scale, bias)
    wanted = gated_activation(wanted.to(dtype), "silu").double()
    found = multiply_row(x, weight, scale, bias, norm=Norm(norm, 1e-6), activation="silu", **way)
    assert_close(found, wanted, 2 * FEWER_BITS)


@pytest.mark.parametrize("sizes", [(528, 4112), (2112, 7168), (7168, 2304)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40, 100, 101])
def test_it_runs_in_graphs_with_other_numbers_than_were_captured(rows, sizes):
    x, weight, scale, bias = operands(rows, *sizes, torch.bfloat16)
    kernel = triton(weight, scale)
    other = torch.randn_like(x)
    wanted = kernel(other, weight, scale, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(x, weight, scale, bias)
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)


def test_it_is_one_op_to_a_compiler():
    _, weight, scale, bias = operands(1, 96, 64, torch.bfloat16)
    kernel = triton(weight, scale)

    def body(x):
        return torch.nn.functional.silu(kernel(x, weight, scale, bias)) * 2

    compiled = torch.compile(body, fullgraph=True, dynamic=True)
    for rows in (3, 100):
        x = torch.randn(rows, 64, device=GPU).to(torch.bfloat16)
        torch.testing.assert_close(compiled(x), body(x), rtol=2**-7, atol=2**-7)


def test_this_gpu_takes_triton():
    kernels = kernel_set(TARGET, with_aiter=False)
    kernels.select(FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(256, 128, False, torch.bfloat16))
    assert kernels.choices()[0].implementation == "triton"
