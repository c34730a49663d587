"""Linear layers in FP8 with a scale a block: what of a checkpoint they load, and which sizes they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.fp8_block_linear.reference import ReferenceFp8BlockLinear
from atom_core.layers.block_fp8 import check_blocks
from atom_core.layers.linear import Column, Linear, MergedColumnLinear, QkvLinear, RowLinear
from atom_core.layers.linear_methods import Shard
from atom_core.quant.fp8 import Fp8Config
from atom_core.runtime import SingleRank
from atom_core.standalone import build_runtime
from tests.unit.core.fp8_checkpoints import E4M3, quantize_blocks, widen
from tests.unit.core.ranks import on_ranks

PLAIN = build_runtime(torch.device("cpu"), torch.float32, 8)
NAMES = ("weight_scale_inv", "weight_scale")
RUNTIMES = {name: replace(PLAIN, quant=Fp8Config(serialized=True, block=True, scale=name)) for name in NAMES}
BLOCKS = RUNTIMES[NAMES[0]]
every_name = pytest.mark.parametrize("name", NAMES)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(layer, tensors):
    for module, name, placement in layer.placements():
        tensor = tensors[module, name]
        dtype = {E4M3: "F8_E4M3", torch.float32: "F32"}[tensor.dtype]
        assert placement.problem(tuple(tensor.shape), dtype) is None
        placement.load(tensor)
    layer.finalize_weights()
    return layer


def stored(weight, module="", name=NAMES[0]):
    """A matrix as a checkpoint has it."""
    quantized, scale = quantize_blocks(weight)
    return {(module, "weight"): quantized, (module, name): scale}


def test_layers_keep_a_scale_a_block():
    layer = Linear(300, 130, False, BLOCKS)
    assert layer.quantized
    assert layer.weight.dtype == E4M3
    assert layer.weight_scale.shape == (2, 3)
    assert layer.weight_scale.dtype == torch.float32


@every_name
@pytest.mark.parametrize("bias", [False, True])
def test_a_layers_answer_is_the_op_of_what_is_stored(bias, name):
    weight, x, offset = numbers(130, 300), numbers(3, 300, seed=1), numbers(130, seed=2)
    tensors = stored(weight, name=name)
    layer = load(Linear(300, 130, bias, RUNTIMES[name]), tensors | {("", "bias"): offset})
    wanted = ReferenceFp8BlockLinear()(x, tensors["", "weight"], tensors["", name], offset if bias else None)
    assert torch.equal(layer(x), wanted)
    near = x @ weight.T + (offset if bias else 0)
    torch.testing.assert_close(layer(x), near, rtol=0.1, atol=0.05 * near.abs().max().item())


def test_scales_in_bfloat16_are_read():
    placement = {name: it for _, name, it in Linear(300, 130, False, BLOCKS).placements()}["weight_scale_inv"]
    assert placement.problem((2, 3), "BF16") is None
    placement.load(torch.full((2, 3), 0.5, dtype=torch.bfloat16))
    assert torch.equal(placement.parameter, torch.full((2, 3), 0.5))


def test_merged_columns_keep_the_scales_of_each():
    columns = (Column("gate_proj", 128, range(128)), Column("up_proj", 300, range(300)))
    gate, up = numbers(128, 200), 5 * numbers(300, 200, seed=1)
    layer = load(
        MergedColumnLinear(200, columns, False, BLOCKS), stored(gate, "../gate_proj") | stored(up, "../up_proj")
    )
    x = numbers(3, 200, seed=2)
    parts = [load(Linear(200, len(weight), False, BLOCKS), stored(weight))(x) for weight in (gate, up)]
    assert torch.equal(layer(x), torch.cat(parts, -1))


def test_ranks_hold_the_parts_of_the_whole():
    weight = numbers(200, 512)
    qkv = {f"../{name}": numbers(rows, 300, seed=3) for name, rows in (("q_proj", 512), ("k_proj", 256))}
    qkv["../v_proj"] = numbers(256, 300, seed=4)
    tensors = {key: tensor for module, matrix in qkv.items() for key, tensor in stored(matrix, module).items()}
    whole_column = load(QkvLinear(300, 4, 2, 128, False, BLOCKS), tensors)
    whole_row = load(RowLinear(512, 200, False, BLOCKS, "inputs"), stored(weight))
    x, wide = numbers(3, 300, seed=5), numbers(3, 512, seed=6)
    q, k, v = whole_column(x).split((512, 256, 256), -1)
    summed = whole_row(wide)

    def work(group):
        mine = replace(BLOCKS, tensor_parallel=group)
        column = load(QkvLinear(300, 4, 2, 128, False, mine), tensors)
        row = load(RowLinear(512, 200, False, mine, "inputs"), stored(weight))
        found = column(x).split((256, 128, 128), -1)
        for part, whole in zip(found, (q, k, v), strict=True):
            assert torch.equal(part, whole.chunk(2, -1)[group.rank])
        here = slice(256 * group.rank, 256 * group.rank + 256)
        assert torch.equal(row.weight_scale, whole_row.weight_scale.chunk(2, 1)[group.rank])
        # Groups are quantised by themselves, so ranks sum to what one rank has.
        torch.testing.assert_close(row(wide[:, here]), summed, rtol=1e-5, atol=1e-3)

    on_ranks(2, work)


def shared(world_size):
    return replace(BLOCKS, tensor_parallel=SingleRank(world_size=world_size))


def test_a_rank_with_a_part_of_a_block_of_inputs_is_refused():
    says = (
        r"tensor parallel size 4 would cut FP8 blocks of model.layers.0.mlp.down_proj: a rank would hold 192 of its "
        r"768 columns, and scales are for blocks of 128 by 128. Use a tensor parallel size that leaves each rank whole "
        r"blocks \(1, 2, 3\), or a checkpoint with a scale for each row."
    )
    with pytest.raises(ValueError, match=says):
        RowLinear(768, 256, False, shared(4), "intermediate_size", "model.layers.0.mlp.down_proj")
    assert RowLinear(768, 256, False, shared(3), "intermediate_size", "mlp.down_proj").weight_scale.shape == (2, 2)


def test_a_rank_with_a_part_of_a_block_of_outputs_is_refused():
    with pytest.raises(
        ValueError, match=r"size 4 would cut FP8 blocks of mlp.up_proj: .* 96 of its 384 rows.*\(1, 3\)"
    ):
        MergedColumnLinear(256, [Column("up_proj", 384, range(96))], False, shared(4), "mlp.gate_up_proj")


def test_heads_that_ranks_share_are_whole_blocks_too():
    with pytest.raises(ValueError, match=r"cut FP8 blocks of self_attn.k_proj: a rank would hold 64 of its 128 rows"):
        QkvLinear(256, 8, 2, 64, False, shared(4), "self_attn.qkv_proj")


def test_a_part_that_begins_within_a_block_is_refused():
    says = (
        "mlp.up_proj is merged with other matrices into one weight, in which it begins at row 200: within an FP8 "
        r"block of 128 by 128 \(weight_block_size, .*\). Supported: sizes that are multiples of 128"
    )
    columns = (Column("gate_proj", 200, range(200)), Column("up_proj", 200, range(200)))
    with pytest.raises(ValueError, match=says):
        MergedColumnLinear(256, columns, False, BLOCKS, "mlp.gate_up_proj")


def test_another_way_out_is_named():
    with pytest.raises(ValueError, match=r"whole blocks \(1\), or stand on your head, or a checkpoint"):
        check_blocks(Shard("", 128, 8, range(64), range(8)), "m", 2, ", or stand on your head")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "says"),
    [
        ("weight", (130, 299), "F8_E4M3", "is [130, 299], should be [130, 300]"),
        ("weight", (130, 300), "BF16", "is stored as BF16, but config.json says FP8"),
        ("weight_scale_inv", (130, 1), "F32", "is [130, 1], should be [2, 3]"),
        ("weight_scale_inv", (), "F32", "is [], should be [2, 3]"),
        ("weight_scale_inv", (2, 3), "F8_E8M0", "is stored as F8_E8M0"),
    ],
)
def test_what_does_not_fit_is_said(name, shape, dtype, says):
    placements = {found: placement for _, found, placement in Linear(300, 130, False, BLOCKS).placements()}
    assert says in placements[name].problem(shape, dtype)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_cannot_scale_is_refused(scale):
    placements = {found: placement for _, found, placement in Linear(300, 130, False, BLOCKS).placements()}
    scales = torch.ones(2, 3)
    scales[1, 1] = scale
    with pytest.raises(ValueError, match="holds a scale that is no finite number of at least 0"):
        placements["weight_scale_inv"].load(scales)


def test_the_tests_own_checkpoints_are_near_what_they_are_made_of():
    weight = numbers(130, 300)
    quantized, scale = quantize_blocks(weight)
    torch.testing.assert_close(quantized.float() * widen(scale, weight.shape), weight, rtol=2**-4, atol=0.02)
