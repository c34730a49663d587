"""Linear layers in FP8: what of a checkpoint they load, and what they make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.layers.linear import Column, Linear, MergedColumnLinear, QkvLinear, RowLinear
from atom_core.quant.fp8 import Fp8Config
from atom_core.standalone import build_runtime
from tests.unit.core.fp8_checkpoints import E4M3, quantize
from tests.unit.core.ranks import on_ranks

PLAIN = build_runtime(torch.device("cpu"), torch.float32, 8)
ONLINE = replace(PLAIN, quant=Fp8Config(serialized=False))
DYNAMIC = replace(PLAIN, quant=Fp8Config(serialized=True))
STATIC = replace(PLAIN, quant=Fp8Config(serialized=True, input_scale="static"))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(layer, tensors):
    """Load by (module, name) as :meth:`placements` has them; all must be there and fit."""
    for module, name, placement in layer.placements():
        tensor = tensors[module, name]
        dtype = {E4M3: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        assert placement.problem(tuple(tensor.shape), dtype) is None
        placement.load(tensor)
    layer.finalize_weights()
    return layer


def stored(weight, *, per_row=False, scale_shape=(), input_scale=None, module=""):
    """A matrix in FP8 as a checkpoint has it."""
    quantized, scale = quantize(weight, per_row, scale_shape)
    tensors = {(module, "weight"): quantized, (module, "weight_scale"): scale}
    if input_scale is not None:
        tensors[module, "input_scale"] = torch.full(scale_shape, input_scale)
    return tensors


def test_layers_say_whether_they_are_quantised():
    assert not Linear(16, 16, False, PLAIN).quantized
    assert Linear(16, 16, False, DYNAMIC).quantized
    ignoring = replace(PLAIN, quant=Fp8Config(serialized=True, ignored=("o_proj",)))
    kept = Linear(16, 16, False, ignoring, "model.layers.0.self_attn.o_proj")
    assert not kept.quantized
    assert kept.weight.dtype == torch.float32
    assert Linear(16, 16, False, ignoring, "model.layers.0.mlp.down_proj").weight.dtype == E4M3


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_one_scale_becomes_one_a_row(scale_shape):
    weight = numbers(6, 16)
    layer = load(Linear(16, 6, False, DYNAMIC), stored(weight, scale_shape=scale_shape))
    assert torch.equal(layer.weight_scale, (weight.abs().max() / 448).expand(6))
    assert torch.equal(layer.weight.float(), quantize(weight, False, ())[0].float())


@pytest.mark.parametrize("flat", [False, True])
def test_a_scale_a_row_is_taken_as_it_is(flat):
    weight = numbers(6, 16)
    tensors = stored(weight, per_row=True)
    scale = tensors["", "weight_scale"]
    tensors["", "weight_scale"] = scale[:, 0] if flat else scale
    assert torch.equal(load(Linear(16, 6, False, DYNAMIC), tensors).weight_scale, scale[:, 0])


@pytest.mark.parametrize("per_row", [False, True])
def test_merged_columns_keep_the_scales_of_each(per_row):
    columns = (Column("gate_proj", 4, range(4)), Column("up_proj", 6, range(6)))
    gate, up = numbers(4, 16), 5 * numbers(6, 16, seed=1)
    layer = MergedColumnLinear(16, columns, False, DYNAMIC)
    load(layer, stored(gate, module="../gate_proj", per_row=per_row) | stored(up, module="../up_proj", per_row=per_row))
    x = numbers(3, 16, seed=2)
    expected = torch.cat(
        [load(Linear(16, len(weight), False, DYNAMIC), stored(weight, per_row=per_row))(x) for weight in (gate, up)], -1
    )
    torch.testing.assert_close(layer(x), expected)


def test_merged_columns_share_the_largest_input_scale():
    columns = (Column("gate_proj", 4, range(4)), Column("up_proj", 6, range(6)))
    layer = MergedColumnLinear(16, columns, False, STATIC)
    gate = stored(numbers(4, 16), module="../gate_proj", input_scale=0.02)
    up = stored(numbers(6, 16), module="../up_proj", input_scale=0.03, scale_shape=(1,))
    load(layer, gate | up)
    assert layer.method._input_scale(layer).tolist() == pytest.approx([0.03])
    assert layer.input_scale.tolist() == pytest.approx([0.02, 0.03]), "what was loaded stays for updates of one part"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("runtime", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_a_layers_answer_is_the_product_of_what_is_stored(runtime, bias):
    weight, x, offset = numbers(6, 16), numbers(3, 16, seed=1), numbers(6, seed=2)
    tensors = stored(weight, input_scale=0.01 if runtime is STATIC else None)
    layer = load(Linear(16, 6, bias, runtime), tensors | {("", "bias"): offset})
    wide = tensors["", "weight"].float() * tensors["", "weight_scale"]
    scale = torch.tensor(0.01) if runtime is STATIC else x.abs().amax(-1, keepdim=True) / 448
    quantized = (x / scale).clamp(-448, 448).to(E4M3).float() * scale
    torch.testing.assert_close(layer(x), quantized @ wide.T + (offset if bias else 0))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("runtime", [DYNAMIC, STATIC, ONLINE], ids=["dynamic", "static", "online"])
def test_ranks_hold_the_parts_of_the_whole(runtime, per_row):
    weight, offset = numbers(8, 32), numbers(8, seed=1)
    qkv = {f"../{name}": numbers(rows, 16, seed=3) for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))}
    static = 0.02 if runtime is STATIC else None

    def tensors(weight, module=""):
        if runtime is ONLINE:
            return {(module, "weight"): weight}
        return stored(weight, per_row=per_row, input_scale=static, module=module)

    def row(runtime):
        return load(RowLinear(32, 8, True, runtime, "inputs"), tensors(weight) | {("", "bias"): offset})

    def column(runtime):
        given = {}
        for module, matrix in qkv.items():
            given |= tensors(matrix, module)
        return load(QkvLinear(16, 4, 2, 2, False, runtime), given)

    x = numbers(3, 16, seed=4)
    whole_row, whole_column = row(runtime), column(runtime)
    q, k, v = whole_column(x).split((8, 4, 4), -1)

    def work(group):
        mine = replace(runtime, tensor_parallel=group)
        shared, part = column(mine), row(mine)
        count = 32 // group.world_size
        here = slice(group.rank * count, group.rank * count + count)
        assert torch.equal(part.weight.float(), whole_row.weight[:, here].float())
        assert torch.equal(part.weight_scale, whole_row.weight_scale)
        found = shared(x).split((4, 2, 2), -1)
        for mine, whole in zip(found, (q, k, v), strict=True):
            torch.testing.assert_close(mine, whole.chunk(2, -1)[group.rank])
        # Each rank scales its own part of a token, so the sum is only near the whole's.
        summed = part(numbers(3, 32, seed=5)[:, here])
        torch.testing.assert_close(summed, whole_row(numbers(3, 32, seed=5)), rtol=0.1, atol=0.5)

    on_ranks(2, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_quantised_here_are_those_of_a_checkpoint_with_a_scale_a_row(dtype):
    weight = numbers(6, 16).to(dtype)
    online = load(Linear(16, 6, False, ONLINE), {("", "weight"): weight})
    offline = load(Linear(16, 6, False, DYNAMIC), stored(weight, per_row=True))
    assert torch.equal(online.weight.float(), offline.weight.float())
    assert torch.equal(online.weight_scale, offline.weight_scale)


def test_a_large_weight_is_quantised_in_chunks_to_the_same(monkeypatch):
    weight = numbers(11, 16)
    whole = load(Linear(16, 11, False, ONLINE), {("", "weight"): weight})
    monkeypatch.setattr("atom_core.layers.linear_methods._CHUNK", 4)
    parts = load(Linear(16, 11, False, ONLINE), {("", "weight"): weight})
    assert torch.equal(whole.weight.float(), parts.weight.float())
    assert torch.equal(whole.weight_scale, parts.weight_scale)


def placement(layer, wanted):
    return next(placement for _, name, placement in layer.placements() if name == wanted)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "says"),
    [
        ("weight", (6, 15), "F8_E4M3", r"is \[6, 15\], should be \[6, 16\]"),
        ("weight", (6, 16), "BF16", "is stored as BF16, but config.json says FP8"),
        ("weight", (6, 16), "F8_E5M2", "is stored as F8_E5M2, but config.json says FP8"),
        ("weight_scale", (5,), "F32", r"is \[5\], should be one number or \[6, 1\]"),
        ("weight_scale", (1, 6), "F32", r"is \[1, 6\], should be one number or \[6, 1\]"),
        ("weight_scale", (), "I32", "is stored as I32"),
        ("input_scale", (2,), "F32", r"is \[2\], should be one number"),
    ],
)
def test_what_does_not_fit_is_said(name, shape, dtype, says):
    import re

    assert re.search(says, placement(Linear(16, 6, False, STATIC), name).problem(shape, dtype))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_cannot_scale_is_refused(scale):
    with pytest.raises(ValueError, match="holds a scale that is no finite number of at least 0"):
        placement(Linear(16, 6, False, DYNAMIC), "weight_scale").load(torch.tensor(scale))


def test_inputs_are_divided_by_no_scale_of_0_and_weights_may_have_one():
    placement(Linear(16, 6, False, DYNAMIC), "weight_scale").load(torch.tensor(0.0))
    with pytest.raises(ValueError, match="holds a scale of 0, by which no input can be divided"):
        placement(Linear(16, 6, False, STATIC), "input_scale").load(torch.tensor(0.0))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_cannot_be_quantised_are_refused(number):
    weight = numbers(6, 16)
    weight[3, 3] = number
    with pytest.raises(ValueError, match="holds numbers that are not finite"):
        placement(Linear(16, 6, False, ONLINE), "weight").load(weight)


def test_a_zero_row_is_quantised_to_zeros():
    weight = numbers(6, 16)
    weight[2] = 0
    layer = load(Linear(16, 6, False, ONLINE), {("", "weight"): weight})
    assert torch.equal(layer(numbers(3, 16))[:, 2], torch.zeros(3))
