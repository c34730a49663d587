"""Linear layers in MXFP4: what of a checkpoint they load, and which sizes they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.mxfp4_linear.reference import ReferenceMxfp4Linear, dequantize
from atom_core.layers.linear import Column, Linear, MergedColumnLinear, QkvLinear, RowLinear
from atom_core.layers.linear_methods import Shard
from atom_core.layers.mxfp4_linear import check_groups
from atom_core.quant import Mxfp4LinearConfig
from atom_core.runtime import SingleRank
from atom_core.standalone import build_runtime
from tests.unit.core.mxfp4_checkpoints import pack
from tests.unit.core.ranks import on_ranks

PLAIN = build_runtime(torch.device("cpu"), torch.float32, 8)
RUNTIMES = {rounded: replace(PLAIN, quant=Mxfp4LinearConfig(rounded_inputs=rounded)) for rounded in (False, True)}
PACKED = RUNTIMES[True]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(layer, tensors):
    for module, name, placement in layer.placements():
        tensor = tensors[module, name]
        dtype = {torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype]
        assert placement.problem(tuple(tensor.shape), dtype) is None
        placement.load(tensor)
    layer.finalize_weights()
    return layer


def stored(weight, module=""):
    """A matrix as a checkpoint has it."""
    blocks, scales = pack(weight)
    return {(module, "weight"): blocks, (module, "weight_scale"): scales}


def test_layers_keep_their_weight_packed():
    layer = Linear(96, 130, False, PACKED)
    assert layer.quantized
    assert layer.weight.shape == (130, 48)
    assert layer.weight_scale.shape == (130, 3)
    assert layer.weight.dtype == layer.weight_scale.dtype == torch.uint8


def test_what_is_made_up_is_numbers():
    layer = Linear(96, 130, False, PACKED)
    assert dequantize(layer.weight, layer.weight_scale, torch.float32).abs().max() <= 6 * 2.0**-8


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rounded", RUNTIMES)
def test_a_layers_answer_is_the_op_of_what_is_stored(rounded, bias):
    weight, x, offset = numbers(130, 96), numbers(3, 96, seed=1), numbers(130, seed=2)
    tensors = stored(weight)
    layer = load(Linear(96, 130, bias, RUNTIMES[rounded]), tensors | {("", "bias"): offset})
    wanted = ReferenceMxfp4Linear(rounded)(x, *tensors.values(), offset if bias else None)
    assert torch.equal(layer(x), wanted)
    near = x @ weight.T + (offset if bias else 0)
    assert (layer(x) - near).square().mean() < 0.05 * near.square().mean()


def test_merged_columns_keep_the_scales_of_each():
    columns = (Column("gate_proj", 50, range(50)), Column("up_proj", 30, range(30)))
    gate, up = numbers(50, 96), 5 * numbers(30, 96, seed=1)
    layer = load(
        MergedColumnLinear(96, columns, False, PACKED), stored(gate, "../gate_proj") | stored(up, "../up_proj")
    )
    x = numbers(3, 96, seed=2)
    parts = [load(Linear(96, len(weight), False, PACKED), stored(weight))(x) for weight in (gate, up)]
    assert torch.equal(layer(x), torch.cat(parts, -1))


def test_ranks_hold_the_parts_of_the_whole():
    weight = numbers(200, 128)
    qkv = {f"../{name}": numbers(rows, 96, seed=3) for name, rows in (("q_proj", 80), ("k_proj", 40))}
    qkv["../v_proj"] = numbers(40, 96, seed=4)
    tensors = {key: tensor for module, matrix in qkv.items() for key, tensor in stored(matrix, module).items()}
    whole_column = load(QkvLinear(96, 4, 2, 20, False, PACKED), tensors)
    whole_row = load(RowLinear(128, 200, False, PACKED, "inputs"), stored(weight))
    x, wide = numbers(3, 96, seed=5), numbers(3, 128, seed=6)
    q, k, v = whole_column(x).split((80, 40, 40), -1)
    summed = whole_row(wide)

    def work(group):
        mine = replace(PACKED, tensor_parallel=group)
        column = load(QkvLinear(96, 4, 2, 20, False, mine), tensors)
        row = load(RowLinear(128, 200, False, mine, "inputs"), stored(weight))
        for part, whole in zip(column(x).split((40, 20, 20), -1), (q, k, v), strict=True):
            torch.testing.assert_close(part, whole.chunk(2, -1)[group.rank])
        here = slice(64 * group.rank, 64 * group.rank + 64)
        assert torch.equal(row.weight_scale, whole_row.weight_scale.chunk(2, 1)[group.rank])
        assert torch.equal(row.weight, whole_row.weight.chunk(2, 1)[group.rank])
        # Groups are rounded by themselves, so ranks sum to what one rank has.
        torch.testing.assert_close(row(wide[:, here]), summed, rtol=1e-5, atol=1e-3)

    on_ranks(2, work)


def test_a_rank_with_a_part_of_a_group_is_refused():
    shared = replace(PACKED, tensor_parallel=SingleRank(world_size=4))
    says = (
        r"tensor parallel size 4 would cut MXFP4 groups of model.layers.0.mlp.down_proj: a rank would hold 48 of its "
        r"192 columns, and 32 numbers of a row share a scale. Use a tensor parallel size that leaves each rank whole "
        r"groups \(1, 2, 3\)."
    )
    with pytest.raises(ValueError, match=says):
        RowLinear(192, 64, False, shared, "intermediate_size", "model.layers.0.mlp.down_proj")
    # Rows have scales of their own, so outputs go anywhere.
    assert MergedColumnLinear(96, [Column("up_proj", 12, range(3))], False, shared).weight.shape == (3, 48)


def test_a_row_that_is_no_whole_groups_is_refused():
    says = "mlp.up_proj has 80 columns, which is no multiple of 32, the numbers that share a scale in MXFP4"
    with pytest.raises(ValueError, match=says):
        Linear(80, 64, False, PACKED, "mlp.up_proj")


def test_another_way_out_is_named():
    with pytest.raises(ValueError, match=r"whole groups \(1\), or stand on your head\.$"):
        check_groups(Shard("", 8, 96, range(8), range(48)), "m", 2, ", or stand on your head")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "says"),
    [
        ("weight", (130, 96), "U8", "is [130, 96], should be [130, 48]"),
        ("weight", (130, 48), "BF16", "is stored as BF16, but config.json says MXFP4 (U8) and does not leave this"),
        ("weight_scale", (130, 1), "U8", "is [130, 1], should be [130, 3]"),
        ("weight_scale", (130, 3), "F32", "is stored as F32"),
    ],
)
def test_what_does_not_fit_is_said(name, shape, dtype, says):
    placements = {found: placement for _, found, placement in Linear(96, 130, False, PACKED).placements()}
    assert says in placements[name].problem(shape, dtype)


def test_a_scale_that_is_no_number_is_refused():
    placements = {found: placement for _, found, placement in Linear(96, 130, False, PACKED).placements()}
    scales = torch.full((130, 3), 120, dtype=torch.uint8)
    scales[7, 1] = 255
    with pytest.raises(ValueError, match=r"holds a scale of more than 2\^65, or one that is no number"):
        placements["weight_scale"].load(scales)
