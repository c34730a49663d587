"""The references of the small ops, against their formulas."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.embedding.reference import embedding
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.gated_sum.reference import gated_sum
from atom_core.kernels.linear import LINEAR, LinearSpec, mkldnn, widened
from atom_core.kernels.linear.mkldnn import MkldnnLinear, multiplies
from atom_core.kernels.linear.widened import WidenedLinear
from atom_core.kernels.output_gate.reference import multiply_by_gate
from atom_core.kernels.rms_norm.cpu import rms_norm as rms_norm_on_cpu
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

CPU, GFX942 = Target("cpu", "x86_64"), Target("rocm", "gfx942")

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
#: One rounding of the result.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_close(found, expected):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@every_dtype
def test_rms_norm_adds_the_residual_first_and_returns_the_sum(dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 24), (5, 24), (24,)))
    for given in (None, residual):
        before = x.clone(), None if given is None else given.clone()
        normed, summed = rms_norm(x, weight, 1e-3, given)
        total = x if given is None else x + given
        wide = total.double()
        assert_close(normed, wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double())
        assert summed is None if given is None else torch.equal(summed, total)
        assert torch.equal(x, before[0])
        assert given is None or torch.equal(given, before[1])


@every_dtype
def test_rms_norm_on_a_cpu_is_the_reference_in_fewer_passes(dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 24), (5, 24), (24,)))
    for given in (None, residual):
        expected, total = rms_norm(
            x.double(), weight.double(), 1e-3, None if given is None else (x + given).double() - x
        )
        before = x.clone()
        normed, summed = rms_norm_on_cpu(x, weight, 1e-3, None if given is None else given.clone())
        assert_close(normed, expected)
        assert torch.equal(x, before)
        assert summed is None if given is None else torch.equal(summed.double(), total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("size", [24, 1000])
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "a float32 norm"])
def test_the_triton_rms_norm(dtype, size, wide):
    from atom_core.kernels.rms_norm.triton_kernel import rms_norm as launch

    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, size), (5, size), (size,)))
    weight = weight.float() * 1.0003 if wide else weight
    for given in (None, residual):
        expected, total = rms_norm(x, weight, 1e-3, given)
        normed, summed = launch(x.clone(), weight, 1e-3, None if given is None else given.clone())
        torch.testing.assert_close(normed, expected)
        assert summed is None if given is None else torch.equal(summed, total)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("size", [20, 1500])
def test_the_triton_gated_activation(activation, size):
    from atom_core.kernels.gated_activation.reference import gated_activation
    from atom_core.kernels.gated_activation.triton_kernel import gated_activation as launch

    x = 3 * torch.randn(3, 2 * size)
    torch.testing.assert_close(launch(x, activation), gated_activation(x, activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (2, 1000), (4, 256)])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_triton_output_gate(rows, heads, dim, dtype):
    from atom_core.kernels.output_gate.triton_kernel import multiply_by_gate as launch

    inputs = 3 * torch.randn(rows, 40 + heads * dim + 8)
    inputs[: rows // 2] *= 40  # gates that are shut and open
    inputs = inputs.to(dtype)
    gate = inputs[:, 40 : 40 + heads * dim]
    out, before = torch.randn(rows, heads, dim).to(dtype), inputs.clone()
    expected = out.clone()
    multiply_by_gate(expected, gate)
    launch(out, gate, overlap=False)
    # The interpreter cuts bfloat16 off, where a GPU rounds.
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-7)
    assert torch.equal(inputs, before)


@every_dtype
def test_the_output_gate_is_a_sigmoid_that_is_rounded_once(dtype):
    out, inputs = torch.randn(5, 2, 12).to(dtype), 4 * torch.randn(5, 30).to(dtype)
    gate = inputs[:, 6:]
    exact = out.double() / (1 + (-gate.double()).exp()).view(out.shape)
    multiply_by_gate(out, gate)
    assert_close(out, exact)


#: Weights that each kernel takes: resident and streamed, of sizes that tiles divide and not.
PRODUCTS = [(40, 600), (34, 1024), (18, 5000), (34, 9000)]


@pytest.mark.parametrize(("out_features", "in_features"), PRODUCTS)
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("nvidia", [False, True])
def test_the_triton_linear(rows, out_features, in_features, bias, nvidia):
    from atom_core.kernels.linear.triton_kernel import TritonLinear

    x = torch.randn(rows, in_features + 8, dtype=torch.float16)[:, :in_features]
    weight = (torch.randn(out_features, in_features) / in_features**0.5).half()
    offset = torch.randn(out_features).half() if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    found = TritonLinear(nvidia, overlap=False)(x, weight, offset)
    torch.testing.assert_close(found.double(), expected, rtol=2**-9, atol=2**-9)


def test_rms_norm_of_zeros_is_zeros():
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6, None)[0], torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("silu", lambda x: x / (1 + (-x).exp())),
        ("gelu", lambda x: x / 2 * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    ],
)
def test_gated_activation(activation, formula):
    x = torch.randn(6, 20)
    kernel = kernel_set(CPU).select(GATED_ACTIVATION, GatedActivationSpec(activation, 10, torch.float32))
    gate, up = x.double().chunk(2, -1)
    assert_close(kernel(x), formula(gate) * up)


def test_the_clamped_swiglu():
    x = torch.tensor([[-20.0, 3.0, 20.0, 1.0, 2.0, -20.0, 20.0, -0.5]])  # gates, then ups
    kernel = kernel_set(CPU).select(GATED_ACTIVATION, GatedActivationSpec("clamped_swiglu", 4, torch.float32))
    gate, up = torch.tensor([[-20.0, 3.0, 7.0, 1.0], [2.0, -7.0, 7.0, -0.5]], dtype=torch.float64)
    assert_close(kernel(x), ((up + 1) * gate / (1 + (-1.702 * gate).exp()))[None])


@pytest.mark.parametrize("first", [0, 3, 20])
def test_ids_outside_a_slice_of_the_vocabulary_embed_to_zeros(first):
    table, ids = torch.randn(10, 4), torch.tensor([0, 2, 3, 9, 12, 29])
    found = embedding(ids, table, first)
    for row, token in zip(found, ids.tolist(), strict=True):
        inside = first <= token < first + 10
        assert torch.equal(row, table[token - first] if inside else torch.zeros(4))


@pytest.mark.parametrize("first", [None, 0, 3, 20])
@pytest.mark.parametrize("size", [4, 3000])
def test_the_triton_embedding(size, first):
    from atom_core.kernels.embedding.triton_kernel import embedding as launch

    table = torch.randn(10, size + 2)[:, :size]
    ids = torch.tensor([0, 2, 3, 9] if first is None else [0, 2, 3, 9, 12, 29])
    assert torch.equal(launch(ids, table, first), embedding(ids, table, first))
    assert launch(ids[:0], table, first).shape == (0, size)


def test_a_whole_vocabulary_is_looked_up():
    table = torch.randn(10, 4)
    assert torch.equal(embedding(torch.tensor([3, 9]), table, None), table[[3, 9]])


@pytest.mark.parametrize("bias", [False, True])
def test_linear_keeps_nothing_of_its_own(bias):
    kernel = kernel_set(CPU).select(LINEAR, LinearSpec(6, 4, bias, torch.float32))
    x, weight, offset = torch.randn(3, 6), torch.randn(4, 6), torch.randn(4) if bias else None
    assert not kernel.adopt(weight, offset)
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0.0)
    assert_close(kernel(x, weight, offset), expected)


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="oneDNN multiplies no bfloat16 on this processor")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_a_weight_that_onednn_has_packed_is_needed_no_more(rows, bias):
    x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    offset = torch.randn(96).bfloat16() if bias else None
    kernel = MkldnnLinear()
    assert kernel.adopt(weight, offset)
    expected = x.double() @ weight.double().T
    found = kernel(x, torch.empty(0), offset).double()
    torch.testing.assert_close(found, expected + (offset.double() if bias else 0.0), rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(kernel(x, torch.empty(0), None).double(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (LinearSpec(8, 8, False, torch.bfloat16), None),
        (LinearSpec(8, 8, False, torch.bfloat16, shares_weight=True), "in memory twice"),
        (LinearSpec(8, 8, False, torch.float32), "pays for bfloat16"),
        (LinearSpec(8, 8, False, torch.bfloat16, float32_result=True), "not in float32"),
    ],
)
def test_which_weights_are_packed(monkeypatch, spec, reason):
    monkeypatch.setattr(mkldnn, "multiplies", lambda dtype: True)
    (implementation,) = (one for one in LINEAR.implementations if one.name == "torch")
    found = implementation.supports(spec, CPU)
    assert found is None if reason is None else reason in found


def test_nothing_is_packed_on_a_processor_without_products_in_bfloat16(monkeypatch):
    for module in (mkldnn, widened):
        monkeypatch.setattr(module, "multiplies", lambda dtype: False)
    kernels, spec = kernel_set(CPU), LinearSpec(8, 8, False, torch.bfloat16)
    kernels.select(LINEAR, spec)
    (choice,) = kernels.choices()
    assert choice.implementation == "widened"
    assert "AVX-512" in dict(choice.passed_over)["torch"]


@pytest.mark.parametrize(
    ("dtype", "target", "options", "reason"),
    [
        (torch.float32, CPU, {}, "Numbers of two bytes"),
        (torch.float16, GFX942, {}, "on CPUs alone"),
        (torch.float16, CPU, {"float32_result": True}, "rounded to the model's dtype"),
        (torch.float16, CPU, {"shares_weight": True}, None),
        (torch.bfloat16, CPU, {}, "multiplies torch.bfloat16"),
    ],
)
def test_which_products_are_widened(monkeypatch, dtype, target, options, reason):
    monkeypatch.setattr(widened, "multiplies", lambda dtype: dtype == torch.bfloat16)
    (implementation,) = (one for one in LINEAR.implementations if one.name == "widened")
    found = implementation.supports(LinearSpec(8, 8, False, dtype, **options), target)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 8, 8), (1, 64, 96), (3, 64, 96), (4, 64, 96), (40, 1, 5), (7, 8192, 100)], ids=str
)
def test_widened_products_are_rounded_once(shape, bias, dtype):
    rows, in_features, out_features = shape
    x, weight = torch.randn(rows, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
    offset = torch.randn(out_features).to(dtype) if bias else None
    kernel = WidenedLinear()
    assert not kernel.adopt(weight, offset)
    found = kernel(x, weight, offset)
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0.0)
    assert found.dtype == dtype
    # Half of what the last digit is worth, and float32's own error of long sums.
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-3)


def test_widened_products_are_one_op_to_a_compiler():
    x, weight = torch.randn(5, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    compiled = torch.compile(WidenedLinear(), backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, weight, None), WidenedLinear()(x, weight, None))


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_results_in_float32(rows, bias):
    from atom_core.kernels.linear.triton_kernel import TritonLinear
    from atom_core.kernels.normed_linear import Operands
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear

    x, norm, weight = torch.randn(rows, 272).half(), torch.rand(272).half(), torch.randn(48, 272).half()
    offset = torch.randn(48).half() if bias else None
    by_torch = kernel_set(CPU).select(LINEAR, LinearSpec(272, 48, bias, torch.float16, float32_result=True))
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0.0)
    for kernel in (by_torch, TritonLinear(True, overlap=False, float32_result=True)):
        found = kernel(x, weight, offset)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    if rows != 1:
        return  # what several rows are normed to is rounded
    normed = TritonNormedLinear(None, nvidia=True, overlap=False)
    found = normed(x, norm, 1e-3, Operands(weight, offset, float32_result=True))
    expected = rms_norm(x.double(), norm.double(), 1e-3, None)[0] @ weight.double().T + (offset.double() if bias else 0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), PRODUCTS)
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "a float32 norm"])
def test_the_triton_normed_linear(out_features, in_features, bias, rows, activation, wide):
    from atom_core.kernels.normed_linear import Operands
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear

    x, norm = torch.randn(rows, in_features).half(), torch.rand(in_features)
    norm = norm if wide else norm.half()
    weight = (torch.randn(out_features, in_features) / in_features**0.5).half()
    offset = torch.randn(out_features).half() if bias else None
    kernel = TritonNormedLinear(activation, nvidia=True, overlap=False)
    found = kernel(x, norm, 1e-3, Operands(weight, offset))
    expected = rms_norm(x.double(), norm.double(), 1e-3, None)[0] @ weight.double().T
    expected += 0 if offset is None else offset.double()
    if activation is not None:
        expected = gated_activation(expected, activation)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), PRODUCTS)
@pytest.mark.parametrize("nvidia", [False, True])
def test_the_triton_linear_adds_to_a_residual(nvidia, out_features, in_features, bias, rows):
    from atom_core.kernels.linear.triton_kernel import TritonLinear

    x, residual = torch.randn(rows, in_features).half(), torch.randn(rows, out_features).half()
    weight = (torch.randn(out_features, in_features) / in_features**0.5).half()
    offset = torch.randn(out_features).half() if bias else None
    expected = residual.double() + x.double() @ weight.double().T + (0 if offset is None else offset.double())
    found = TritonLinear(nvidia, overlap=False).add(x, weight, offset, residual)
    assert found is residual
    torch.testing.assert_close(found.double(), expected, rtol=2**-9, atol=2**-9)


def check_one_row(tile, in_features, around):
    from atom_core.kernels.linear.triton_kernel import Norm, product

    x = torch.randn(1, in_features).half()
    weight, bias = (torch.randn(34, in_features) / in_features**0.5).half(), torch.randn(34).half()
    norm = residual = activation = None
    expected = x.double()
    if around == "norm and activation":
        norm, activation = Norm(torch.rand(in_features).half(), 1e-3), "silu"
        expected = rms_norm(expected, norm.weight.double(), norm.eps, None)[0]
    expected = expected @ weight.double().T + bias.double()
    if activation is not None:
        expected = gated_activation(expected, activation)
    if around == "residual":
        residual = torch.randn(1, 34).half()
        expected += residual.double()
    found = product(x, weight, bias, tile=tile, overlap=False, norm=norm, activation=activation, residual=residual)
    assert found is residual or residual is None
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-8)


around_one_row = pytest.mark.parametrize("around", ["nothing", "norm and activation", "residual"])


@pytest.mark.parametrize("in_features", [512, 600, 2048, 3000])
@pytest.mark.parametrize("stages", [2, 3])
@around_one_row
def test_one_row_with_tiles_in_shared_memory(around, stages, in_features):
    from atom_core.kernels.linear.tiles import Tile

    check_one_row(Tile("ring", 8, 512, 4, stages), in_features, around)


@around_one_row
def test_one_row_by_every_tile_that_was_tuned(around):
    from atom_core.kernels import tuned
    from atom_core.kernels.linear.tiles import Tile
    from atom_plugin.bench.tune import OP_FOLDER

    tiles = {Tile(**tile) for shape, tile in tuned.load(OP_FOLDER, "NVIDIA H200").items() if shape.rows == 1}
    assert len(tiles) > 5
    for tile in tiles:
        check_one_row(tile, 2048, around)


def test_no_more_of_a_weight_is_fetched_than_lies_behind_its_first_tile(monkeypatch):
    import triton

    from atom_core.kernels.linear import tiles

    whole, some = (tiles.Tile("row", 8, 512, 4, fetch=size) for size in (4096, 256))
    weight = torch.empty(16, 2048, dtype=torch.bfloat16)
    assert whole.fetched(weight, overlap=True) == 0  # Triton's interpreter has no instruction for it
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert (whole.fetched(weight, overlap=True), some.fetched(weight, overlap=True)) == (2 * 1536, 256)
    assert whole.fetched(weight, overlap=False) == 0
    assert whole.fetched(torch.empty(16, 512, dtype=torch.bfloat16), overlap=True) == 0
    assert whole.fetched(torch.empty(16, 2044, dtype=torch.bfloat16), overlap=True) == 0  # rows begin anywhere


def test_a_product_takes_the_tile_that_was_measured(monkeypatch):
    from atom_core.kernels.linear import tiles, triton_kernel

    asked = []

    def lookup(folder, device, *shape):
        asked.append((folder.name, device, *shape))
        return {"kernel": "row", "rows": 2, "columns": 128, "warps": 4, "stages": 1, "early": True}

    monkeypatch.setattr(tiles.tuned, "lookup", lookup)
    tiles._chosen_tile.cache_clear()
    x, weight = torch.randn(1, 96).half(), torch.randn(52, 96).half()
    assert tiles.chosen_tile(x, weight, nvidia=True).columns == 128
    torch.testing.assert_close(triton_kernel.TritonLinear(True, overlap=False)(x, weight, None), x @ weight.T)
    assert asked == [("linear", "cpu", 1, 52, 96, "float16")]
    tiles._chosen_tile.cache_clear()


def test_a_product_may_be_measured_to_be_torchs(monkeypatch):
    from atom_core.kernels.linear import tiles

    x, weight = torch.randn(1, 96).half(), torch.randn(52, 96).half()
    assert tiles.chosen_tile(x, weight, nvidia=True) is not None
    monkeypatch.setattr(tiles.tuned, "lookup", lambda *asked: dict(tiles.TORCH))
    tiles._chosen_tile.cache_clear()
    assert tiles.chosen_tile(x, weight, nvidia=True) is None
    tiles._chosen_tile.cache_clear()


def test_a_tile_that_is_tried_is_taken_for_its_shape_alone_and_no_longer():
    from atom_core.kernels import tuned
    from atom_core.kernels.linear.tiles import Tile, chosen_tile, tried

    tile = Tile("row", 2, 256, 4)
    x, weight, other = torch.randn(1, 96).half(), torch.randn(52, 96).half(), torch.randn(48, 96).half()
    before = [chosen_tile(x, it, nvidia=True) for it in (weight, other)]
    with tried({tuned.Shape(1, 52, 96, "float16"): tile}):
        assert [chosen_tile(x, it, nvidia=True) for it in (weight, other)] == [tile, before[1]]
    with tried({tuned.Shape(1, 52, 96, "float16"): None}):
        assert [chosen_tile(x, it, nvidia=True) for it in (weight, other)] == [None, before[1]]
    assert [chosen_tile(x, it, nvidia=True) for it in (weight, other)] == before


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "itemsize", "hopper", "tokens"),
    [
        (64, 1024, 2048, 2, True, 16),
        (65, 1024, 2048, 2, True, 32),
        (256, 1024, 2048, 2, True, 32),
        (100, 6144, 1024, 2, True, 128),
        (256, 6144, 1024, 2, True, 128),
        (128, 2048, 2048, 2, True, 32),
        (256, 2048, 2048, 2, True, 64),
        (128, 3648, 2048, 2, True, 64),
        (65, 64, 2048, 2, True, 16),
        (256, 256, 7168, 2, True, 16),
        (256, 3648, 2048, 2, True, None),
        (65, 4096, 4096, 2, True, None),
        (65, 1024, 2048, 1, True, None),
        (65, 1024, 2048, 2, False, None),
        (65, 1024, 2000, 2, True, None),
        (65, 129280, 7168, 2, True, None),
        (256, 151936, 4096, 2, True, None),
    ],
)
def test_more_than_64_rows_are_ours_by_a_small_weight_on_hopper(
    rows, out_features, in_features, itemsize, hopper, tokens
):
    from atom_core.kernels.linear.tiles import tile_for

    tile = tile_for(rows, out_features, in_features, itemsize, nvidia=True, hopper=hopper)
    assert (None if tile is None else tile.tokens) == tokens


@pytest.mark.parametrize(
    ("rows", "in_features", "hopper", "ours"),
    [
        (16, 7168, True, True),
        (17, 7168, True, True),
        (64, 4096, True, True),
        (64, 2048, True, False),
        (64, 4160, True, False),
        (17, 7168, False, False),
    ],
)
def test_a_head_of_many_inputs_is_ours_up_to_64_rows_on_hopper(rows, in_features, hopper, ours):
    from atom_core.kernels.linear.tiles import tile_for

    tile = tile_for(rows, 129280, in_features, 2, nvidia=True, hopper=hopper)
    assert (tile is not None) == ours
    assert tile is None or tile.kernel == "rows"


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "split"),
    [
        (2, 1024, 2048, 4),
        (8, 2048, 4096, 4),
        (8, 2048, 2048, 2),
        (16, 4096, 12288, 2),
        (17, 1024, 2048, 1),
        (8, 4096, 1024, 1),
        (8, 5120, 25600, 1),
        (8, 2048, 10944, 1),
        # Routers, with a gate of shared experts.
        (17, 272, 2048, 4),
        (128, 528, 2048, 4),
        (144, 528, 2048, 1),
        (256, 256, 2048, 4),
    ],
)
def test_programs_of_few_rows_on_hopper_have_few_of_a_narrow_weight(rows, out_features, in_features, split):
    from atom_core.kernels.linear.tiles import tile_for

    tile = tile_for(rows, out_features, in_features, 2, nvidia=True, hopper=True)
    assert tile is not None
    assert tile.split == split
    assert tile.rows * split == 64


@pytest.mark.parametrize(
    ("out_features", "in_features", "itemsize", "hopper", "ours"),
    [
        (6144, 4096, 2, True, True),
        (24576, 4096, 2, True, True),
        (4096, 12288, 2, True, True),
        (28672, 4096, 2, True, True),
        (2560, 9728, 2, True, True),
        (2048, 2048, 2, True, True),
        (1024, 2048, 2, True, False),  # Small: read in about the time of a launch.
        (34816, 5120, 2, True, False),  # A large hidden size.
        (5120, 17408, 2, True, False),
        (5120, 2880, 2, True, False),  # Not whole steps of the kernel.
        (151936, 4096, 2, True, False),  # A head.
        (6144, 4096, 2, False, False),
    ],
)
def test_one_row_by_a_large_weight_is_a_product_by_wgmma_on_hopper(out_features, in_features, itemsize, hopper, ours):
    from atom_core.kernels.linear.tiles import tile_for

    tile = tile_for(1, out_features, in_features, itemsize, nvidia=True, hopper=hopper)
    assert tile is not None
    assert (tile.kernel == "hopper") == ours
    assert not ours or tile.early


@pytest.mark.parametrize("model", ["qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "qwen3-8b", "qwen3-4b"])
def test_one_row_has_one_kind_of_kernel_by_all_large_weights_of_a_model(model):
    from atom_core.kernels.linear.tiles import _chosen_tile
    from atom_core.models.read_config import read_model_config
    from atom_plugin.bench.cases import products
    from atom_plugin.bench.models import read_config

    sizes = {(it.out_features, it.in_features) for it in products(read_model_config(read_config(model)))}
    large = [(rows, columns) for rows, columns in sizes if rows < 65536 and rows * columns * 2 > 4 << 20]
    assert len(large) > 2
    kernels = {_chosen_tile("NVIDIA H200", 1, *size, "bfloat16", True, True).kernel == "hopper" for size in large}
    assert len(kernels) == 1


def test_more_rows_than_any_tile_takes_are_torchs():
    from atom_core.kernels.linear.tiles import MOST_ROWS, chosen_tile

    x, weight = torch.randn(MOST_ROWS + 1, 64).half(), torch.randn(32, 64).half()
    assert chosen_tile(x, weight, nvidia=True) is None
    assert chosen_tile(x[:0], weight, nvidia=True) is None


@pytest.mark.parametrize(("product", "most"), [("linear", 256), ("fp8_linear", 64), ("mxfp4_linear", 64)])
def test_norm_and_product_are_one_call_for_as_many_rows_as_the_products_kernel_takes(product, most):
    from atom_core.kernels.normed_linear import NormedLinearSpec, _build_triton

    spec = NormedLinearSpec(64, 32, None, (("rms_norm", "triton"), (product, "triton")))
    assert _build_triton(spec, Target("cuda", "sm90")).max_rows == most


@pytest.mark.parametrize("size", [1, 40, 1024, 2880])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@every_dtype
def test_gated_sum(tokens, size, dtype):
    from atom_core.kernels.gated_sum.triton_kernel import gated_sum as launch

    x, y = (torch.randn(tokens, size + 3, dtype=torch.float32).to(dtype)[:, :size] for _ in range(2))
    gate = torch.randn(tokens, 9, dtype=torch.float32)[:, -1:]
    wanted = x.double() + y.double() / (1 + (-gate.double()).exp())
    # Triton's interpreter truncates to bfloat16, where a GPU rounds.
    for kernel in (gated_sum, partial(launch, overlap=False))[: 1 if dtype == torch.bfloat16 else 2]:
        found = kernel(x, y, gate)
        assert found.dtype == dtype
        assert_close(found, wanted)
