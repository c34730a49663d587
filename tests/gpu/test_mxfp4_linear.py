"""Products with MXFP4 weights on this GPU, against float64, with NaN around whatever must not be read."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.mxfp4_linear.inputs import prepare
from atom_core.kernels.mxfp4_linear.reference import dequantize, round_groups
from atom_core.kernels.mxfp4_linear.triton_kernel import TritonMxfp4Linear
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps

GPU = torch.device("cuda")
TARGET = Target.of(GPU)
OVERLAP = overlaps(TARGET)
NVIDIA = TARGET.kind == "cuda"
#: One rounding of the result, and sums in float32.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
either = pytest.mark.parametrize("rounded", [False, True], ids=["as they are", "rounded"])
#: (N, K) of an 8B's layers; of a last tile that is smaller, and of one group.
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (144, 1056), (5760, 2880), (16, 32)]
ROWS = [1, 3, 17, MAX_ROWS, MAX_ROWS + 1, 140, 515]


def operands(rows, out_features, in_features, dtype):
    """Rows of x have a gap of NaN after them, as a slice of a wider buffer has; scales differ by up to 16 times."""
    torch.manual_seed(0)
    wide = torch.full((rows, in_features + 8), float("nan"), dtype=dtype, device=GPU)
    sizes = torch.logspace(-2, 2, in_features // 32, 2, device=GPU).repeat_interleave(32)
    wide[:, :in_features] = torch.randn(rows, in_features, device=GPU) * sizes
    blocks = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device=GPU)
    scales = torch.randint(114, 119, (out_features, in_features // 32), dtype=torch.uint8, device=GPU)
    return wide[:, :in_features], blocks, scales, torch.randn(out_features, device=GPU).to(dtype)


def expected(x, blocks, scales, bias, rounded):
    left = round_groups(x) if rounded else x
    return left.double() @ dequantize(blocks, scales, torch.float64).T + bias.double()


def assert_close(found, wanted):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def triton(rounded):
    return TritonMxfp4Linear(rounded, nvidia=NVIDIA, overlap=OVERLAP)


@every_dtype
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@either
def test_the_product(rounded, rows, out_features, in_features, dtype):
    x, blocks, scales, bias = operands(rows, out_features, in_features, dtype)
    wanted = expected(x, blocks, scales, bias, rounded)
    kernel = triton(rounded)
    assert_close(kernel(x, blocks, scales, bias), wanted)
    if rows <= MAX_ROWS:
        residual = torch.randn(rows, out_features, device=GPU).to(dtype)
        wanted += residual.double()
        assert_close(kernel.add(x, blocks, scales, bias, residual), wanted)


@every_dtype
@pytest.mark.parametrize("size", [32, 2880, 12288])
def test_inputs_are_rounded_as_the_reference_rounds(size, dtype):
    x = operands(9, 16, size, dtype)[0]
    x[1], x[2, 3] = 0, float("inf")
    found, wanted = prepare(x, OVERLAP, rounds=True, parts=1), round_groups(x)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("activation", [None, "silu"])
@either
def test_a_norm_in_front_of_few_rows(rounded, activation, rows):
    x, blocks, scales, bias = operands(rows, 6144, 4096, torch.bfloat16)
    norm = torch.rand(4096, device=GPU).to(torch.bfloat16)
    wanted = expected(rms_norm(x, norm, 1e-6, None)[0], blocks, scales, bias, rounded)
    if activation is not None:
        wanted = gated_activation(wanted.to(torch.bfloat16), activation).double()
    kernel = TritonNormedLinear(activation, nvidia=NVIDIA, overlap=OVERLAP)
    found = kernel(x, norm, 1e-6, Operands(blocks, bias, scales, rounded_inputs=rounded)).double()
    # The norm sums in another order: a number at a tie becomes another of four bits.
    error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < 0.02


@every_dtype
@either
def test_it_can_be_captured(rounded, dtype):
    x, blocks, scales, bias = operands(8, 4096, 4096, dtype)
    kernel = triton(rounded)
    kernel(x, blocks, scales, bias)  # compiles it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(x, blocks, scales, bias)
    x.copy_(x.flip(0).clone())
    graph.replay()
    assert_close(found, expected(x, blocks, scales, bias, rounded))
