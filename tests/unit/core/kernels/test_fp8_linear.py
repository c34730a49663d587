"""Products with FP8 weights against their definition, and who says that they can run."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.fp8_linear.reference import E4M3, ReferenceFp8Linear, quantize_input, row_scales
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, ScaledMm, clear_minus_zeros, multiply
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

CPU, CUDA, GFX942 = Target("cpu", "x86_64"), Target("cuda", "sm90"), Target("rocm", "gfx942")
SPEC = Fp8LinearSpec(64, 32, False, torch.bfloat16, "dynamic")
#: One rounding of the result, and sums in float32.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
every_scale = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])


def operands(rows, dtype=torch.bfloat16, in_features=64, out_features=32, static=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    weight = (100 * torch.randn(out_features, in_features, generator=generator)).clamp(-448, 448).to(E4M3)
    scale = torch.rand(out_features, generator=generator) * 0.01 + 1e-4
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return x, weight, scale, torch.tensor([0.003]) if static else None, bias  # 0.003: some of x is beyond 448 times it


def by_definition(x, weight, weight_scale, input_scale, bias):
    """float64, a number at a time where FP8 is made."""
    rows = []
    for row in x.double():
        scale = row.abs().max() / 448 if input_scale is None else input_scale.double()
        # float32 is what scales and what they are divided into are; what is beyond the last number is cut
        scale = scale.float()
        quotients = [min(max(float(number * (1 / scale)), -448.0), 448.0) for number in row.float()]
        rows.append(torch.tensor(quotients).to(E4M3).double() * scale.double())
    y = torch.stack(rows) @ (weight.double() * weight_scale.double()[:, None]).T
    return y if bias is None else y + bias.double()


def with_its_input_as_it_is(x, weight, weight_scale, bias):
    """float64."""
    y = x.double() @ (weight.double() * weight_scale.double()[:, None]).T
    return y if bias is None else y + bias.double()


def assert_close(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@every_scale
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_reference_is_the_definition(dtype, with_bias, static):
    x, weight, weight_scale, input_scale, bias = operands(5, dtype, static=static)
    given = (x, weight, weight_scale, input_scale, bias if with_bias else None)
    found = ReferenceFp8Linear()(*given)
    assert found.dtype == dtype
    assert_close(found, by_definition(*given))


def test_a_static_scale_cuts_what_is_beyond_it():
    x = torch.tensor([[1e6, -1e6, 1.0]])
    found, scale = quantize_input(x, torch.tensor([0.5]))
    assert found.float().tolist() == [[448.0, -448.0, 2.0]]
    assert scale.tolist() == [0.5]


def test_rows_of_zeros_stay_zeros_and_rows_with_nan_stay_alone():
    x = torch.zeros(3, 64)
    x[1, 7], x[2] = float("nan"), 1.0
    _, weight, weight_scale, _, _ = operands(3)
    y = ReferenceFp8Linear()(x, weight, weight_scale, None, None)
    assert torch.equal(y[0], torch.zeros(32))
    assert y[1].isnan().all()
    assert y[2].isfinite().all()


@pytest.mark.parametrize("kernel", [ReferenceFp8Linear(), ScaledMm(CUDA)], ids=["reference", "scaled_mm"])
@every_scale
def test_no_rows_are_no_rows(static, kernel):
    x, weight, weight_scale, input_scale, bias = operands(1, static=static)
    assert kernel(x[:0], weight, weight_scale, input_scale, bias).shape == (0, 32)


@every_scale
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_product_is_the_definition(dtype, with_bias, static):
    # torch has its FP8 product on a CPU too, for tests like this one.
    x, weight, weight_scale, input_scale, bias = operands(17, dtype, static=static)
    given = (x, weight, weight_scale, input_scale, bias if with_bias else None)
    found = ScaledMm(CUDA)(*given)
    assert found.dtype == dtype
    assert_close(found, by_definition(*given))


def test_the_bits_of_e4m3_are_half_as_much_in_e4m3fnuz():
    weight = torch.arange(256, dtype=torch.uint8).view(E4M3)
    weight = weight[weight.float().isfinite()].clone()
    assert weight.view(FNUZ).float().isnan().any(), "minus zero is NaN there"
    expected = weight.float()
    clear_minus_zeros(weight)
    assert torch.equal(weight.float(), expected)
    assert torch.equal(2 * weight.view(FNUZ).float(), expected)


def quantize_in_triton(x, input_scale, dtype):
    from atom_core.kernels.fp8_linear.quantize import quantize

    return quantize(x, input_scale, dtype, overlap=False)


def edges(rows=4, size=5000):
    """Rows with zeros, NaN, infinities, and more numbers than one tile has; there is a gap after each."""
    x = torch.randn(rows, size + 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)[:, :size]
    x[1] = 0
    x[2, 3] = float("nan")
    x[3, size - 1] = -9e4
    return x


@every_scale
@pytest.mark.parametrize("size", [16, 1000, 5000])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_triton_quantises_as_the_reference_does(size, static):
    x = edges(size=size)
    given = torch.tensor([0.01]) if static else None
    found, scales = quantize_in_triton(x, given, E4M3)
    expected, expected_scales = quantize_input(x, given)
    expected_scales = expected_scales.expand(4, 1)
    usable = [0, 1, 3]
    assert torch.equal(scales[usable], expected_scales[usable])
    assert torch.equal(found.float()[usable], expected.float()[usable])
    assert found[2].float().isnan().any()


@every_scale
@pytest.mark.usefixtures("exact_fp8_casts")
def test_triton_quantises_to_e4m3fnuz_with_the_factor_of_both_sides(static):
    x = edges()[[0, 1, 3]]
    given = torch.tensor([0.01]) if static else None
    found, scales = quantize_in_triton(x, given, FNUZ)
    expected, expected_scales = quantize_input(x, given)
    assert torch.equal(2 * found.float(), expected.float())
    assert torch.equal(scales, 4 * expected_scales.expand(3, 1))


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, MAX_ROWS])
@pytest.mark.parametrize("sizes", [(64, 32), (272, 48), (1040, 80)], ids=str)
@every_scale
@pytest.mark.usefixtures("exact_fp8_casts")
def test_few_rows_in_triton(static, sizes, rows, fnuz):
    from atom_core.kernels.fp8_linear.triton_kernel import TritonFp8Linear

    x, weight, weight_scale, input_scale, bias = operands(rows, torch.float16, *sizes, static)
    kernel = TritonFp8Linear(GFX942 if fnuz else CUDA, overlap=False)
    kernel.adopt(weight, weight_scale)
    expected = by_definition(x, weight, weight_scale, input_scale, bias)
    if rows == 1 and not fnuz:
        expected = with_its_input_as_it_is(x, weight, weight_scale, bias)
    assert_close(kernel(x, weight, weight_scale, input_scale, bias), expected)
    residual = torch.randn(rows, sizes[1]).to(torch.float16)
    wanted = residual.double() + expected
    found = kernel.add(x, weight, weight_scale, input_scale, bias, residual)
    assert found is residual
    assert_close(found, wanted)
    assert kernel(x[:0], weight, weight_scale, input_scale, bias).shape == (0, sizes[1])


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("sizes", [(64, 32), (1040, 80)], ids=str)
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
def test_one_row_in_triton(around, sizes, fnuz, dtype):
    from atom_core.kernels.fp8_linear.one_row import multiply_row
    from atom_core.kernels.linear.tiles import Tile
    from atom_core.kernels.linear.triton_kernel import Norm

    x, weight, weight_scale, _, bias = operands(1, dtype, *sizes)
    x[0, 5:9] = torch.tensor([3e4, -2e-5, 0.0, 7e3])
    norm = residual = activation = None
    wanted = x.double()
    if around.endswith("norm and activation"):
        norm_dtype = torch.float32 if around.startswith("float32") else dtype
        norm, activation = Norm(torch.rand(sizes[0]).to(norm_dtype), 1e-6), "silu"
        wanted = wanted / wanted.square().mean().add(1e-6).sqrt() * norm.weight.double()
    wanted = with_its_input_as_it_is(wanted, weight, weight_scale, bias)
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
        weight_scale,
        bias,
        tile=Tile("row", 16, 512, 4),
        native=False,
        overlap=False,
        norm=norm,
        activation=activation,
        residual=residual,
    )
    assert found is residual or residual is None
    assert_close(found, wanted)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_in_one_row_shows(number):
    from atom_core.kernels.fp8_linear.one_row import multiply_row
    from atom_core.kernels.linear.tiles import Tile

    x, weight, weight_scale, _, _ = operands(1, torch.bfloat16, 1040, 48)
    x[0, 100] = number
    tile = Tile("row", 16, 512, 4)
    y = multiply_row(x, weight, weight_scale, None, tile=tile, native=False, overlap=False)
    assert not y.isfinite().any()
    zeros = torch.zeros_like(x)
    assert torch.equal(
        multiply_row(zeros, weight, weight_scale, None, tile=tile, native=False, overlap=False), torch.zeros_like(y)
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.usefixtures("exact_fp8_casts")
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32], ids=str)
def test_a_norm_in_front_of_few_rows(activation, rows, norm_dtype):
    from atom_core.kernels.normed_linear import Operands
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear

    x, weight, weight_scale, _, bias = operands(rows, torch.float16, 272, 48)
    norm = torch.rand(272).to(norm_dtype)
    normed = rms_norm(x, norm, 1e-6, None)[0]
    if rows == 1:
        exact = x.double() / x.double().square().mean().add(1e-6).sqrt() * norm.double()
        wanted = with_its_input_as_it_is(exact, weight, weight_scale, bias)
    else:
        wanted = by_definition(normed, weight, weight_scale, None, bias)
    if activation is not None:
        wanted = gated_activation(wanted.to(torch.float16), activation).double()
    kernel = TritonNormedLinear(activation, nvidia=True, overlap=False)
    assert_close(kernel(x, norm, 1e-6, Operands(weight, bias, weight_scale)), wanted)


@pytest.mark.usefixtures("exact_fp8_casts")
def test_many_rows_in_triton_are_quantised_and_torchs():
    from atom_core.kernels.fp8_linear.triton_kernel import TritonFp8Linear

    x, weight, weight_scale, _, bias = operands(MAX_ROWS + 1)
    found = TritonFp8Linear(CUDA, overlap=False)(x, weight, weight_scale, None, bias)
    assert torch.equal(found, ScaledMm(CUDA)(x, weight, weight_scale, None, bias))


def test_a_row_by_row_product_takes_every_rows_scales():
    x, weight, weight_scale, _, _ = operands(20)
    quantized, scale = quantize_input(x, None)
    found = multiply(quantized, scale, weight, weight_scale, None, torch.bfloat16)
    expected = (quantized.double() * scale) @ (weight.double() * weight_scale[:, None]).T
    assert_close(found, expected)


def test_scales_of_rows_are_their_largest_magnitudes():
    x = torch.tensor([[-448.0, 3.0], [0.5, -0.25]], dtype=torch.bfloat16)
    assert torch.equal(row_scales(x), torch.tensor([[1.0], [0.5 / 448]]))


@pytest.mark.parametrize(
    ("target", "changes", "implementation", "why_not"),
    [
        (CPU, {}, "reference", []),
        (CUDA, {}, "triton", []),
        (GFX942, {}, "triton", []),
        (Target("rocm", "gfx950"), {}, "triton", []),
        (Target("cuda", "sm80"), {}, "reference", ["from sm89 on, not on sm80", "from sm89 on, not on sm80"]),
        (Target("rocm", "gfx90a"), {}, "reference", ["gfx942 and gfx950, not on gfx90a"] * 2),
        (CUDA, {"in_features": 40}, "reference", ["multiples of 16, not 40 and 32"] * 2),
        (CUDA, {"out_features": 20}, "reference", ["multiples of 16, not 64 and 20"] * 2),
        (CUDA, {"dtype": torch.float32}, "scaled_mm", ["inputs of two bytes, not for torch.float32"]),
    ],
    ids=str,
)
def test_who_runs_it(target, changes, implementation, why_not):
    kernels = kernel_set(target, with_aiter=False)
    kernels.select(FP8_LINEAR, Fp8LinearSpec(**{**vars(SPEC), **changes}))
    (choice,) = kernels.choices()
    assert choice.implementation == implementation
    passed_over = [it for it in choice.passed_over if it[0] != "aiter"]
    assert len(passed_over) == len(why_not)
    for (_, reason), part in zip(passed_over, why_not, strict=True):
        assert part in reason


def test_a_forced_one_that_cannot_run_says_why():
    with pytest.raises(ValueError, match=r"fp8_linear=scaled_mm, which cannot run on cpu .* is for GPUs"):
        kernel_set(CPU, {"fp8_linear": "scaled_mm"}).select(FP8_LINEAR, SPEC)
