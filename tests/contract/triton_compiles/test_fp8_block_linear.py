"""Linear layers in FP8 blocks, and their quantiser, compile for each GPU."""

from __future__ import annotations

import re

import pytest
import torch

from atom_core.kernels.fp8_block_linear import few_rows as few_block_rows_kernel
from atom_core.kernels.fp8_block_linear import few_rows_hopper as hopper_block_rows_kernel
from atom_core.kernels.fp8_block_linear import many_rows as many_block_rows_kernel
from atom_core.kernels.fp8_block_linear import quantize as groups_kernel
from atom_core.kernels.fp8_block_linear import specialized_hopper as specialized_kernel
from atom_core.kernels.fp8_linear import one_row as fp8_row_kernel
from atom_core.kernels.fp8_linear.quantize import Made
from atom_core.kernels.fp8_linear.scaled_mm import dtype_of
from atom_core.kernels.linear import triton_kernel as linear_kernel
from tests.contract.triton_compiles.compiling import FRONTS, GPUS, Gpu, compiles, every_gpu, in_front, zeros


@every_gpu
@pytest.mark.parametrize(("size", "group"), [(200, 128), (4096, 128), (12288, 128), (768, None)])
@pytest.mark.parametrize("way", [*FRONTS, "rows of slots", "and clears"])
def test_quantising_groups_compiles(way, size, group, gpu):
    of, numbers = in_front(way, size) if way in FRONTS else Made(), torch.zeros(2, dtype=torch.int32)
    others = {"rows of slots": {"slots": numbers}, "and clears": {"cleared": numbers}}.get(way, {})
    x = zeros(2, 2 * size if way == "activated" else size)
    with compiles(groups_kernel, "_quantize_groups", gpu):
        groups_kernel.quantize_groups(x, dtype_of(gpu.device), gpu.nvidia, group=group, of=of, **others)


def in_blocks(rows: int, out_features: int, in_features: int, gpu: Gpu) -> tuple[torch.Tensor, ...]:
    """``x`` and its scales, a weight and its scales."""
    groups, dtype = -(-in_features // 128), dtype_of(gpu.device)
    x, weight = (torch.zeros(size, in_features, dtype=torch.uint8).view(dtype) for size in (rows, out_features))
    return x, torch.ones(groups, rows), weight, torch.ones(-(-out_features // 128), groups)


@every_gpu
@pytest.mark.parametrize("norm", [None, linear_kernel.Norm(zeros(2064), 1e-6)], ids=["alone", "normed"])
@pytest.mark.parametrize("in_features", [2048, 2064])
@pytest.mark.parametrize("out_features", [1024, 5120])
def test_one_row_by_blocks_compiles(out_features, in_features, norm, gpu):
    _, _, weight, scales = in_blocks(1, out_features, in_features, gpu)
    with compiles(fp8_row_kernel, "_one_row", gpu):
        fp8_row_kernel.multiply_row(
            zeros(1, in_features),
            weight,
            scales,
            None,
            tile=fp8_row_kernel.tile_for(out_features, in_features),
            block=128,
            native=gpu.nvidia,
            overlap=gpu.nvidia,
            norm=norm,
            activation="silu" if norm else None,
            residual=None if norm else zeros(1, out_features),
        )


@every_gpu
@pytest.mark.parametrize("way", ["plain", "adding", "activated"])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 4096, 4096), (24, 4096, 12288), (64, 1000, 200)])
def test_few_rows_by_blocks_compile(rows, out_features, in_features, way, gpu):
    with compiles(few_block_rows_kernel, "_few_rows", gpu):
        few_block_rows_kernel.multiply_few_rows(
            *in_blocks(rows, out_features, in_features, gpu),
            zeros(out_features),
            nvidia=gpu.nvidia,
            overlap=gpu.nvidia,
            dtype=torch.bfloat16,
            activation="silu" if way == "activated" else None,
            residual=zeros(rows, out_features) if way == "adding" else None,
        )


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("rows", [2, 16, 32, 64])
@pytest.mark.parametrize("size", [(2048, 4096), (12288, 2048), (24576, 4096), (36864, 7168)], ids=str)
def test_few_rows_by_blocks_for_hopper_compile(monkeypatch, size, rows, activation):
    if size[0] <= 132 * 64 and not activation:
        return  # specialised warps do it
    gpu = GPUS[-1]
    monkeypatch.setattr(few_block_rows_kernel, "on_hopper", lambda _: True)
    with compiles(hopper_block_rows_kernel, "few_rows_hopper", gpu):
        few_block_rows_kernel.multiply_few_rows(
            *in_blocks(rows, *size, gpu),
            zeros(size[0]),
            nvidia=True,
            overlap=True,
            dtype=torch.bfloat16,
            activation=activation,
            residual=None if activation else zeros(rows, size[0]),
        )


@pytest.mark.parametrize(
    ("rows", "size"),
    [(2, (2048, 4096)), (16, (1000, 128)), (32, (5120, 2048)), (64, (4096, 4096)), (256, (2112, 7168))],
    ids=str,
)
def test_rows_by_blocks_with_specialised_warps_compile(monkeypatch, size, rows):
    gpu = GPUS[-1]
    monkeypatch.setattr(few_block_rows_kernel, "on_hopper", lambda _: True)
    with compiles(specialized_kernel, "specialized_rows_hopper", gpu) as found:
        few_block_rows_kernel.multiply_few_rows(
            *in_blocks(rows, *size, gpu),
            zeros(size[0]),
            nvidia=True,
            overlap=True,
            dtype=torch.bfloat16,
            residual=zeros(rows, size[0]),
        )
    assert found.compiled is not None
    # All warps of a group have multiplied before one of them gives the tile's place away.
    waits, arrives = r"wgmma\.wait_group\.sync\.aligned\s+0", r"mbarrier\.arrive\."
    ends = re.findall(rf"{waits}(.*?){arrives}", found.compiled.asm["ptx"], re.DOTALL)
    assert ends
    assert all(re.search(r"bar(rier)?\.(cta\.)?sync", it) for it in ends)


@every_gpu
@pytest.mark.parametrize("bias", [None, zeros(4096)], ids=["plain", "with a bias"])
@pytest.mark.parametrize(("rows", "in_features"), [(80, 4096), (300, 4096), (3000, 4096), (3000, 200)])
def test_many_rows_by_blocks_compile(rows, in_features, bias, gpu):
    with compiles(many_block_rows_kernel, "_many_rows", gpu):
        many_block_rows_kernel.multiply_many_rows(
            *in_blocks(rows, 4096, in_features, gpu), bias, nvidia=gpu.nvidia, dtype=torch.bfloat16
        )
