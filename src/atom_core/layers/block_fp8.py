"""FP8 weights with a scale for each block of 128 by 128: which shards ranks may have, and linear layers.

A rank has whole blocks: a block's scale is one element, and one rank quantises a group of an activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, FewRowsFp8BlockKernel, Fp8BlockLinearSpec
from atom_core.kernels.fp8_inputs import InputForm, LinearInput, as_quantized_input_kernel
from atom_core.kernels.moved import MovingKernel
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.select import KernelSet
from atom_core.layers.linear_methods import Fp8Placement, Shard, check_scales, empty_fp8, empty_scales
from atom_core.layers.parameters import Placement
from atom_core.quant.fp8 import BLOCK_SIZE, Fp8Config
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from atom_core.layers.linear import Linear


def num_blocks(size: int) -> int:
    """Blocks along a dimension of a weight; the last may be smaller."""
    return -(-size // BLOCK_SIZE)


def check_blocks(
    shard: Shard, module: str, world_size: int, instead: str = "", ranks: str = "tensor parallel size"
) -> None:
    """Check that a shard consists of whole blocks, and begins with a block.

    Args:
        shard: of the weight.
        module: its checkpoint module.
        world_size: the number of ranks that share it.
        instead: an alternative for the user, after a comma.
        ranks: the name of the setting of ``world_size``.

    Raises:
        ValueError: it does not.
    """
    for mine, total, what in ((shard.my_rows, shard.rows, "rows"), (shard.my_columns, shard.columns, "columns")):
        if mine != range(total) and len(mine) % BLOCK_SIZE:
            if world_size == 1:
                raise ValueError(
                    f"{module} has parts of {len(mine)} {what}, which are arranged anew here (as a head's query and "
                    f"gate), and FP8 scales are for blocks of {BLOCK_SIZE} by {BLOCK_SIZE}. Supported: parts of a "
                    f"multiple of {BLOCK_SIZE}, or a checkpoint with a scale for each row."
                )
            sizes = [size for size in range(1, world_size) if total % size == 0 and total // size % BLOCK_SIZE == 0]
            raise ValueError(
                f"{ranks} {world_size} would cut FP8 blocks of {module}: a rank would hold {len(mine)} of "
                f"its {total} {what}, and scales are for blocks of {BLOCK_SIZE} by {BLOCK_SIZE}. Use a "
                f"{ranks} that leaves each rank whole blocks ({', '.join(map(str, sizes or [1]))}){instead}, or a "
                "checkpoint with a scale for each row."
            )
    if shard.begin % BLOCK_SIZE:
        raise ValueError(
            f"{module} is merged with other matrices into one weight, in which it begins at row {shard.begin}: "
            f"within an FP8 block of {BLOCK_SIZE} by {BLOCK_SIZE} (weight_block_size, block_structure or block_size of "
            f"the config). Supported: sizes that are multiples of {BLOCK_SIZE}, or a checkpoint with a scale for each "
            "row."
        )


class BlockScalePlacement(Placement):
    """The scales of a weight's blocks, or of some of its rows or columns of blocks."""

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        check_scales(tensor)

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        self.check(tensor)
        super().load(tensor)


def place_scales(shard: Shard, parameter: torch.Tensor) -> Placement:
    """This rank's blocks of ``shard``, in scales ``[blocks of rows, blocks of columns]`` of the whole weight."""

    def blocks(mine: range) -> range:
        return range(mine.start // BLOCK_SIZE, num_blocks(mine.stop))

    of_blocks = Shard(
        shard.module,
        num_blocks(shard.rows),
        num_blocks(shard.columns),
        blocks(shard.my_rows),
        blocks(shard.my_columns),
        shard.begin // BLOCK_SIZE,
    )
    return of_blocks.of_matrix(parameter, BlockScalePlacement)


class BlockFp8Method:
    """See :class:`atom_core.layers.linear_methods.LinearMethod`."""

    def __init__(self, scheme: Fp8Config) -> None:
        self.scheme = scheme

    def create(self, layer: Linear, runtime: Runtime) -> None:
        """Register the weight, and the scales of its blocks.

        Raises:
            ValueError: blocks would be cut.
        """
        for shard, module in zip(layer.shards, layer.shard_modules, strict=True):
            check_blocks(shard, module, runtime.tensor_parallel.world_size)
        in_features, out_features = layer.in_features, layer.out_features
        self.spec = Fp8BlockLinearSpec(in_features, out_features, layer.bias is not None, runtime.dtype)
        self.kernel = runtime.kernels.select(FP8_BLOCK_LINEAR, self.spec)
        self.few_rows_kernel = self.kernel if isinstance(self.kernel, FewRowsFp8BlockKernel) else None
        self.quantized_input_kernel = as_quantized_input_kernel(self.kernel)
        layer.weight = empty_fp8(runtime, out_features, in_features)
        layer.weight_scale = empty_scales(runtime, num_blocks(out_features), num_blocks(in_features))

    def placements(self, layer: Linear, shard: Shard) -> Iterator[tuple[str, Placement]]:
        """The weight and its scales."""
        yield "weight", shard.of_matrix(layer.weight, Fp8Placement)
        yield self.scheme.scale, replace(place_scales(shard, layer.weight_scale), parameter_name="weight_scale")

    def input_form(self) -> InputForm | None:
        """See :class:`LinearMethod`."""
        return None if self.quantized_input_kernel is None else self.quantized_input_kernel.form

    def takes_quantized(self, rows: int) -> bool:
        """See :class:`LinearMethod`."""
        return self.quantized_input_kernel is not None and self.quantized_input_kernel.takes_quantized(rows)

    def apply(self, layer: Linear, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`LinearMethod`."""
        if isinstance(x, torch.Tensor):
            return self.kernel(x, layer.weight, layer.weight_scale, bias)
        assert self.quantized_input_kernel is not None
        return self.quantized_input_kernel.multiply(x, layer.weight, layer.weight_scale, bias)

    def add(
        self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """See :class:`LinearMethod`."""
        if self.few_rows_kernel is None or not 0 < x.shape[0] <= self.few_rows_kernel.max_rows:
            return None
        return self.few_rows_kernel.add(x, layer.weight, layer.weight_scale, bias, residual)

    def chosen(self, layer: Linear, kernels: KernelSet) -> tuple[str, str]:
        """See :class:`LinearMethod`."""
        return FP8_BLOCK_LINEAR.name, kernels.chosen(FP8_BLOCK_LINEAR, self.spec)

    def operands(self, layer: Linear) -> Operands:
        """See :class:`LinearMethod`."""
        assert self.few_rows_kernel is not None, "few rows are asked for where the Triton kernel was chosen"
        return Operands(self.few_rows_kernel.stored(layer.weight), layer.bias, layer.weight_scale)

    def finalize(self, layer: Linear) -> None:
        """See :class:`LinearMethod`."""
        self.kernel.adopt(layer.weight, layer.weight_scale)

    def restore(self, layer: Linear, whole: bool) -> None:
        """See :class:`LinearMethod`."""
        if isinstance(self.kernel, MovingKernel) and not whole:
            self.kernel.move_back(layer.weight)
