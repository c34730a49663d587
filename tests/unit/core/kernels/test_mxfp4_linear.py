"""Products with MXFP4 weights against their definition, how inputs are rounded, and who says that they can run."""

from __future__ import annotations

import math

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.mxfp4_linear import MXFP4_LINEAR, Mxfp4LinearSpec
from atom_core.kernels.mxfp4_linear.reference import NUMBERS, ReferenceMxfp4Linear, dequantize, requantize, round_groups
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

CPU, CUDA, GFX942 = Target("cpu", "x86_64"), Target("cuda", "sm90"), Target("rocm", "gfx942")
#: One rounding of the result, and sums in float32.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
#: (K, N): whole tiles, the last of each side smaller, one group.
SIZES = [(256, 256), (288, 144), (544, 130), (32, 16)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
either = pytest.mark.parametrize("rounded", [False, True], ids=["as they are", "rounded"])


def operands(rows, dtype=torch.float16, in_features=288, out_features=144):
    """Groups of both sides differ by up to 16 times: one that is another's shows. Rows of x have a gap of NaN."""
    generator = torch.Generator().manual_seed(0)
    groups = in_features // 32
    wide = torch.full((rows, in_features + 8), float("nan"), dtype=dtype)
    sizes = torch.logspace(-2, 2, groups, 2).repeat_interleave(32)
    wide[:, :in_features] = torch.randn(rows, in_features, generator=generator) * sizes
    blocks = torch.randint(256, (out_features, in_features // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 124, (out_features, groups), generator=generator, dtype=torch.uint8)
    return wide[:, :in_features], blocks, scales, torch.randn(out_features, generator=generator).to(dtype)


def nearest(number):
    """Of e2m1's, and of two as near the one whose code is even."""
    codes = sorted(range(8), key=lambda code: (abs(NUMBERS[code] - abs(number)), code % 2))
    return math.copysign(NUMBERS[codes[0]], number)


def rounded_by_definition(x):
    """float64, a number at a time; 1.75 times a power of two is what one bit after the first rounds to the next."""
    found = torch.empty(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for begin in range(0, len(row), 32):
            group = row[begin : begin + 32]
            fraction, exponent = math.frexp(group.abs().max().item())
            scale = 2.0 ** (exponent - 1 - 2 + (2 * fraction >= 1.75))
            found[token, begin : begin + 32] = torch.tensor([nearest(it / scale) * scale for it in group.tolist()])
    return found


def by_definition(x, blocks, scales, bias, rounded):
    """float64."""
    left = rounded_by_definition(x) if rounded else x.double()
    y = left @ dequantize(blocks, scales, torch.float64).T
    return y if bias is None else y + bias.double()


def assert_close(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def edges():
    """Groups with every tie, with numbers beyond 6 scales, and whose largest is just below and at the next scale."""
    groups = torch.zeros(6, 32)
    groups[0, :16] = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6.9375])
    groups[1] = -groups[0]
    groups[2] = groups[0] * 2.0**-9
    groups[3, 0], groups[4, 0] = 7.0, 6.9375
    return groups.view(2, 96)


def test_numbers_are_rounded_as_defined():
    x = torch.cat([edges(), operands(5, torch.bfloat16, 96)[0].float()])
    found = round_groups(x)
    x[1, 64:] = 1  # a group of zeros has no exponent
    expected = rounded_by_definition(x)
    assert torch.equal(found[1, 64:], torch.zeros(32))
    expected[1, 64:] = 0
    assert torch.equal(found.double(), expected)


def triton(rounded, nvidia=True):
    from atom_core.kernels.mxfp4_linear.triton_kernel import TritonMxfp4Linear

    return TritonMxfp4Linear(rounded, nvidia=nvidia, overlap=False)


@pytest.mark.parametrize("planes", [1, 2, 4])
@pytest.mark.parametrize("size", [32, 96, 1056])
@either
def test_triton_prepares_inputs_as_the_reference_rounds(rounded, size, planes):
    from atom_core.kernels.mxfp4_linear.inputs import prepare

    x = operands(4, torch.bfloat16, size)[0]
    x[1] = 0
    if size == 96:
        x[:2] = edges()
    expected = round_groups(x) if rounded else x
    expected = torch.cat([expected[:, plane::planes] for plane in range(planes)], 1)
    assert torch.equal(prepare(x, overlap=False, rounds=rounded, planes=planes), expected)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_what_is_not_finite_stays_in_its_group(name):
    from atom_core.kernels.mxfp4_linear.inputs import prepare

    x = torch.ones(2, 96, dtype=torch.bfloat16)
    x[0, 3], x[1, 40] = float("nan"), float("-inf")
    found = round_groups(x) if name == "reference" else prepare(x, overlap=False, rounds=True, planes=1)
    nan = found.isnan().view(2, 3, 32)
    assert nan.all(-1).tolist() == [[True, False, False], [False, True, False]]
    assert found[~found.isnan()].eq(1).all()


def test_rows_that_are_no_slots_are_left_out():
    from atom_core.kernels.mxfp4_linear.inputs import prepare

    x, slots = operands(4)[0], torch.tensor([3, -1, 0, -1], dtype=torch.int32)
    found = prepare(x, overlap=False, rounds=True, planes=1, slots=slots)
    assert torch.equal(found[[0, 2]], round_groups(x)[[0, 2]])


@every_size
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@either
def test_the_reference_is_the_definition(rounded, dtype, with_bias, sizes):
    x, blocks, scales, bias = operands(5, dtype, *sizes)
    given = (x, blocks, scales, bias if with_bias else None)
    found = ReferenceMxfp4Linear(rounded)(*given)
    assert found.dtype == dtype
    assert_close(found, by_definition(*given, rounded))


@pytest.mark.parametrize("name", ["reference", "triton"])
@either
def test_no_rows_are_no_rows(rounded, name):
    x, blocks, scales, bias = operands(1)
    kernel = ReferenceMxfp4Linear(rounded) if name == "reference" else triton(rounded)
    assert kernel(x[:0], blocks, scales, bias).shape == (0, 144)


@pytest.mark.parametrize("nvidia", [True, False], ids=["NVIDIA", "AMD"])
@pytest.mark.parametrize("rows", [1, 17, MAX_ROWS])
@every_size
@either
def test_few_rows_in_triton(rounded, sizes, rows, nvidia):
    x, blocks, scales, bias = operands(rows, torch.float16, *sizes)
    kernel = triton(rounded, nvidia)
    expected = by_definition(x, blocks, scales, bias, rounded)
    assert_close(kernel(x, blocks, scales, bias), expected)
    residual = torch.randn(rows, sizes[1]).to(torch.float16)
    wanted = residual.double() + expected
    found = kernel.add(x, blocks, scales, bias, residual)
    assert found is residual
    assert_close(found, wanted)


@pytest.mark.parametrize("nvidia", [True, False], ids=["NVIDIA", "AMD"])
@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 600])
@every_size
def test_many_rows_in_triton(sizes, rows, nvidia):
    x, blocks, scales, bias = operands(rows, torch.float16, *sizes)
    bias = None if rows == 600 else bias
    wanted = by_definition(round_groups(x), blocks, scales, bias, rounded=False)
    assert_close(triton(True, nvidia)(x, blocks, scales, bias), wanted)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_in_triton(dtype, rows):
    given = operands(rows, dtype)
    assert_close(triton(rounded=True)(*given), by_definition(*given, rounded=True))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("activation", [None, "silu"])
@either
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32], ids=str)
def test_a_norm_in_front_of_few_rows(rounded, activation, rows, norm_dtype):
    from atom_core.kernels.normed_linear import Operands
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear

    x, blocks, scales, bias = operands(rows, torch.float16, 288, 256)
    x.div_(4)  # whose squares are numbers of float16 too
    norm = torch.rand(288).to(norm_dtype)
    wanted = by_definition(rms_norm(x, norm, 1e-6, None)[0], blocks, scales, bias, rounded)
    if activation is not None:
        wanted = gated_activation(wanted.to(torch.float16), activation).double()
    kernel = TritonNormedLinear(activation, nvidia=True, overlap=False)
    assert_close(kernel(x, norm, 1e-6, Operands(blocks, bias, scales, rounded_inputs=rounded)), wanted)


@pytest.mark.parametrize(
    ("target", "implementation"),
    [(CPU, "reference"), (CUDA, "triton"), (Target("cuda", "sm80"), "triton"), (GFX942, "triton")],
    ids=str,
)
def test_who_runs_it(target, implementation):
    kernels = kernel_set(target, with_aiter=False)
    kernels.select(MXFP4_LINEAR, Mxfp4LinearSpec(288, 144, False, True, torch.bfloat16))
    assert [choice.implementation for choice in kernels.choices()] == [implementation]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_were_made_of_blocks_are_those_blocks_again(dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = torch.randint(60, 190, (4, 4), dtype=torch.uint8)
    assert torch.equal(requantize(dequantize(blocks, scales, dtype), scales), blocks)
