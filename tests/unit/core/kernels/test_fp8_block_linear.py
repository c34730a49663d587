"""Products with FP8 weights in blocks against their definition, and who says that they can run."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_block_linear.reference import ReferenceFp8BlockLinear, block_product, quantize_groups
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

CPU, CUDA, GFX942 = Target("cpu", "x86_64"), Target("cuda", "sm90"), Target("rocm", "gfx942")
#: One rounding of the result, and sums in float32.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
#: (K, N): whole blocks, the last of each side smaller, less than one block.
SIZES = [(256, 256), (272, 144), (384, 130), (48, 16)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def operands(rows, dtype=torch.bfloat16, in_features=272, out_features=144):
    """Scales of blocks and magnitudes of groups differ by up to 16 times: one that is another's shows."""
    generator = torch.Generator().manual_seed(0)
    groups, blocks = -(-in_features // 128), -(-out_features // 128)
    sizes = torch.logspace(-2, 2, groups, 2).repeat_interleave(128)[:in_features]
    x = (torch.randn(rows, in_features, generator=generator) * sizes).to(dtype)
    weight = (100 * torch.randn(out_features, in_features, generator=generator)).clamp(-448, 448).to(E4M3)
    weight.view(torch.uint8).view(-1)[::37] = 0x80  # minus zeros
    scale = torch.exp2(4 * torch.rand(blocks, groups, generator=generator)) * 1e-3
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return x, weight, scale, bias


def by_definition(x, weight, weight_scale, bias):
    """float64, a group of a row at a time where FP8 is made."""
    y = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for token, row in enumerate(x.float()):
        for group, numbers in enumerate(row.split(128)):
            scale = numbers.abs().max().clamp_min(1e-12) / 448
            stored = (numbers * (1 / scale)).clamp(-448, 448).to(E4M3).double()
            block = weight[:, 128 * group : 128 * group + 128].double()
            scales = weight_scale[:, group].double().repeat_interleave(128)[: len(weight)]
            y[token] += (block @ stored) * scales * scale.double()
    return y if bias is None else y + bias.double()


def with_its_input_as_it_is(x, weight, weight_scale, bias):
    """float64."""
    each = weight_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : x.shape[1]]
    y = x.double() @ (weight.double() * each).T
    return y if bias is None else y + bias.double()


def of_few(x, *others, nvidia=True):
    """One row is not quantised on NVIDIA's GPUs."""
    return (with_its_input_as_it_is if nvidia and len(x) == 1 else by_definition)(x, *others)


def assert_close(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@every_size
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_reference_is_the_definition(dtype, with_bias, sizes):
    x, weight, scale, bias = operands(5, dtype, *sizes)
    given = (x, weight, scale, bias if with_bias else None)
    found = ReferenceFp8BlockLinear()(*given)
    assert found.dtype == dtype
    assert_close(found, by_definition(*given))


def test_it_is_the_product_of_the_widened_weight_where_activations_are_exact():
    x = torch.randint(-8, 9, (3, 272)).float()
    x[:, ::128] = 448.0  # each group's scale is 1
    _, weight, scale, _ = operands(1)
    wide = weight.double() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:144, :272].double()
    assert_close(ReferenceFp8BlockLinear()(x, weight, scale, None), x.double() @ wide.T)


def test_rows_of_zeros_stay_zeros_and_rows_with_nan_stay_alone():
    x = torch.zeros(3, 272)
    x[1, 7], x[2] = float("nan"), 1.0
    _, weight, scale, _ = operands(3)
    y = ReferenceFp8BlockLinear()(x, weight, scale, None)
    assert torch.equal(y[0], torch.zeros(144))
    assert y[1].isnan().all()
    assert y[2].isfinite().all()


def triton(target=CUDA):
    from atom_core.kernels.fp8_block_linear.triton_kernel import TritonFp8BlockLinear

    return TritonFp8BlockLinear(target, overlap=False)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_no_rows_are_no_rows(name):
    x, weight, scale, bias = operands(1)
    kernel = ReferenceFp8BlockLinear() if name == "reference" else triton()
    assert kernel(x[:0], weight, scale, bias).shape == (0, 144)


@pytest.mark.parametrize("dtype", [E4M3, FNUZ], ids=str)
@pytest.mark.parametrize("size", [48, 256, 1000, 5000])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_triton_quantises_as_the_reference_does(size, dtype):
    from atom_core.kernels.fp8_block_linear.quantize import quantize_groups as launch

    # There is a gap after each row.
    x = torch.randn(4, size + 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)[:, :size]
    x[1], x[2, 3], x[3, size - 1] = 0, float("nan"), -9e4
    unit = 2 if dtype == FNUZ else 1
    found, scales = launch(x, dtype, overlap=False, group=128)
    wanted, wanted_scales = quantize_groups(x)
    usable = [0, 1, 3]
    assert torch.equal(unit * found.float()[usable], wanted.float()[usable])
    assert torch.equal(scales.T[usable], unit * unit * wanted_scales[usable])
    assert found[2, :48].float().isnan().any()
    assert found[2, 128:].float().isfinite().all(), "other groups of the row are as they were"


@pytest.mark.usefixtures("exact_fp8_casts")
def test_rows_that_are_no_slots_are_left_out():
    from atom_core.kernels.fp8_block_linear.quantize import quantize_groups as launch

    x = operands(4)[0]
    found, scales = launch(x, E4M3, overlap=False, group=None, slots=torch.tensor([3, -1, 0, -1], dtype=torch.int32))
    scale = x[[0, 2]].float().abs().amax(-1) / 448
    assert torch.equal(scales[0, [0, 2]], scale)
    assert torch.equal(found[[0, 2]].float(), (x[[0, 2]].float() * (1 / scale[:, None])).to(E4M3).float())


@pytest.mark.parametrize("count", [1, 3, 4, 13])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_what_the_kernel_behind_counts_with_is_cleared(count):
    from atom_core.kernels.fp8_block_linear.quantize import quantize_groups as launch

    x, around = operands(3)[0], torch.full((count + 2,), -7, dtype=torch.int32)
    found = launch(x, E4M3, overlap=False, group=128, cleared=around[1:-1])
    assert around.tolist() == [-7, *[0] * count, -7]
    wanted = launch(x, E4M3, overlap=False, group=128)
    assert all(torch.equal(mine.float(), theirs.float()) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("target", [CUDA, GFX942], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, MAX_ROWS])
@every_size
@pytest.mark.usefixtures("exact_fp8_casts")
def test_few_rows_in_triton(sizes, rows, target):
    x, weight, scale, bias = operands(rows, torch.float16, *sizes)
    kernel = triton(target)
    kernel.adopt(weight, scale)
    expected = of_few(x, weight, scale, bias, nvidia=target.kind == "cuda")
    assert_close(kernel(x, weight, scale, bias), expected)
    residual = torch.randn(rows, sizes[1]).to(torch.float16)
    wanted = residual.double() + expected
    found = kernel.add(x, weight, scale, bias, residual)
    assert found is residual
    assert_close(found, wanted)


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (1040, 256)], ids=str)
@pytest.mark.parametrize(
    ("around", "dtype"),
    [
        ("nothing", torch.bfloat16),
        ("nothing", torch.float16),
        ("residual", torch.float16),
        # The interpreter cuts bfloat16 off where gate and up are rounded.
        ("norm and activation", torch.float16),
        ("float32 norm and activation", torch.float16),
    ],
    ids=str,
)
@pytest.mark.usefixtures("exact_fp8_casts")
def test_one_row_in_triton(around, sizes, fnuz, dtype):
    from atom_core.kernels.fp8_linear.one_row import multiply_row
    from atom_core.kernels.linear.tiles import Tile
    from atom_core.kernels.linear.triton_kernel import Norm

    if around.endswith("norm and activation") and sizes[1] // 2 % 8:
        sizes = (sizes[0], 176)  # gate ends within a block, as the others' do, and not within a program's rows
    x, weight, scale, bias = operands(1, dtype, *sizes)
    norm = residual = activation = None
    wanted = x
    if around.endswith("norm and activation"):
        norm_dtype = torch.float32 if around.startswith("float32") else dtype
        norm, activation = Norm(torch.rand(sizes[0]).to(norm_dtype), 1e-6), "silu"
        wanted = rms_norm(x.double(), norm.weight.double(), norm.eps, None)[0]
    wanted = with_its_input_as_it_is(wanted, weight, scale, bias)
    if activation is not None:
        wanted = gated_activation(wanted.to(dtype), activation).double()
    if around == "residual":
        residual = torch.randn(1, sizes[1]).to(dtype)
        wanted += residual.double()
    if fnuz:
        clear_minus_zeros(weight)
    found = multiply_row(
        x,
        weight.view(FNUZ) if fnuz else weight,
        scale,
        bias,
        tile=Tile("row", 16, 512, 4),
        block=128,
        native=False,
        overlap=False,
        norm=norm,
        activation=activation,
        residual=residual,
    )
    assert found is residual or residual is None
    assert_close(found, wanted)


@pytest.mark.usefixtures("exact_fp8_casts")
def test_a_row_with_nan_is_nan_whole():
    x, weight, scale, _ = operands(1, torch.float16)
    x[0, 7] = float("nan")
    assert triton()(x, weight, scale, None).isnan().all()


@pytest.mark.usefixtures("exact_fp8_casts")
def test_one_row_that_begins_within_a_word():
    x, weight, scale, bias = operands(1, torch.float16)
    wide = torch.full((1, 280), float("nan"), dtype=torch.float16)
    wide[:, 3:275] = x
    assert_close(triton()(wide[:, 3:275], weight, scale, bias), by_definition(x, weight, scale, bias))


@pytest.mark.parametrize("target", [CUDA, GFX942], ids=str)
@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 140, 600])
@every_size
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_many_rows_in_triton(with_bias, sizes, rows, target):
    x, weight, scale, bias = operands(rows, torch.float16, *sizes)
    kernel = triton(target)
    kernel.adopt(weight, scale)
    bias = bias if with_bias else None
    assert_close(kernel(x, weight, scale, bias), ReferenceFp8BlockLinear()(x, weight, scale, bias).double())


def multiplied_by_torch(x, weight, x_scale, x_kind, weight_scale, weight_kind, *, output_dtype):
    """``scaled_mm`` as torch has it on Hopper, with what that and cuBLAS ask of scales' shapes and strides."""
    kinds = torch.nn.functional.ScalingType
    assert (x_kind, weight_kind) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
    (rows, size), outputs = x.shape, weight.shape[1]
    groups = size // 128
    padded = groups + -groups % 4
    assert size % 128 == outputs % 16 == rows % 4 == 0
    assert (x.stride(), weight.stride()) == ((size, 1), (1, size))
    assert (x_scale.shape, x_scale.stride()) == ((rows, groups), (1, rows))
    assert (weight_scale.shape, weight_scale.stride()) == ((padded, -(-outputs // 128)), (1, padded))
    return block_product(x, x_scale, weight.t(), weight_scale[:groups].t()).to(output_dtype)


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1, 140])
@pytest.mark.parametrize("sizes", [(512, 144), (640, 256), (128, 16)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_more_rows_on_hopper_are_cublas(monkeypatch, with_bias, sizes, rows):
    from atom_core.kernels.fp8_block_linear import cublas

    multiply = Mock(side_effect=multiplied_by_torch)
    monkeypatch.setattr(cublas, "on_hopper", lambda device: True)
    monkeypatch.setattr(cublas, "_in_torch", lambda: True)
    monkeypatch.setattr(cublas.F, "scaled_mm", multiply)
    x, weight, scale, bias = operands(rows, torch.bfloat16, *sizes)
    bias = bias if with_bias else None
    found = triton()(x, weight, scale, bias)
    assert found.is_contiguous()
    assert_close(found, ReferenceFp8BlockLinear()(x, weight, scale, bias).double())
    assert multiply.call_count == (rows > MAX_ROWS)


@pytest.mark.parametrize(
    ("dtype", "sizes", "taken"),
    [
        (torch.bfloat16, (256, 144), True),
        (torch.float16, (256, 144), False),
        (torch.bfloat16, (272, 144), False),
        (torch.bfloat16, (256, 136), False),
    ],
    ids=str,
)
def test_what_cublas_takes(monkeypatch, dtype, sizes, taken):
    from atom_core.kernels.fp8_block_linear import cublas

    _, weight, *_ = operands(70, dtype, *sizes)
    assert not cublas.takes(weight, dtype)  # on a CPU
    monkeypatch.setattr(cublas, "on_hopper", lambda device: True)
    monkeypatch.setattr(cublas, "_in_torch", lambda: True)
    assert cublas.takes(weight, dtype) == taken


@pytest.mark.parametrize(
    ("cuda", "has"), [(None, False), ("12.8", False), ("12.9", True), ("13.0", True), ("13.10", True)]
)
def test_cublas_scales_blocks_from_cuda_12_9_on(monkeypatch, cuda, has):
    from atom_core.kernels.fp8_block_linear import cublas

    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cublas._in_torch.__wrapped__() == has


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.usefixtures("exact_fp8_casts")
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32], ids=str)
def test_a_norm_in_front_of_few_rows(activation, rows, norm_dtype):
    from atom_core.kernels.normed_linear import Operands
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear

    x, weight, scale, bias = operands(rows, torch.float16, 272, 256)
    norm = torch.rand(272).to(norm_dtype)
    wanted = of_few(rms_norm(x, norm, 1e-6, None)[0], weight, scale, bias)
    if activation is not None:
        wanted = gated_activation(wanted.to(torch.float16), activation).double()
    kernel = TritonNormedLinear(activation, nvidia=True, overlap=False)
    assert_close(kernel(x, norm, 1e-6, Operands(weight, bias, scale)), wanted)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_rows_behind_the_last_are_not_read(rows):
    x, weight, scale, _ = operands(rows, torch.float16)
    wide = torch.full((2 * rows, 280), float("nan"), dtype=torch.float16)
    wide[:rows, :272] = x
    found = triton()(wide[:rows, :272], weight, scale, None)
    assert_close(found, by_definition(x, weight, scale, None))


@pytest.mark.parametrize(
    ("target", "implementation", "why_not"),
    [
        (CPU, "reference", None),
        (CUDA, "triton", None),
        (GFX942, "triton", None),
        (Target("rocm", "gfx950"), "triton", None),
        (Target("cuda", "sm80"), "reference", "from sm89 on, not on sm80"),
        (Target("rocm", "gfx90a"), "reference", "gfx942 and gfx950, not on gfx90a"),
    ],
    ids=str,
)
def test_who_runs_it(target, implementation, why_not):
    kernels = kernel_set(target, with_aiter=False)
    kernels.select(FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(272, 144, False, torch.float32))
    (choice,) = kernels.choices()
    assert choice.implementation == implementation
    reasons = [reason for name, reason in choice.passed_over if name != "aiter"]
    assert reasons == [] if why_not is None else why_not in reasons[0]
