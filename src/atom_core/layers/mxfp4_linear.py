"""Linear layers with MXFP4 weights, and which shards ranks may have: whole scale groups.

AMD Quark's checkpoints have ``weight [N, K / 2]`` and ``weight_scale [N, K / 32]`` of each matrix, both uint8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom_core.kernels.fp8_inputs import InputForm, LinearInput
from atom_core.kernels.moved import MovingKernel
from atom_core.kernels.mxfp4_linear import MXFP4_LINEAR, FewRowsMxfp4Kernel, Mxfp4LinearSpec
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.select import KernelSet
from atom_core.layers.linear_methods import Shard
from atom_core.layers.parameters import Placement
from atom_core.quant.mxfp4 import GROUP, Mxfp4LinearConfig
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from atom_core.layers.linear import Linear

#: The largest scale, 2 ** 65: kernels multiply it by a power of two that would exceed bfloat16's exponent otherwise.
LARGEST = 192


def empty_packed(runtime: Runtime, *shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Blocks ``[.., K / 2]`` and scales ``[.., K / 32]`` of a weight of ``shape``, to be loaded."""
    *rows, columns = shape

    def empty(width: int) -> nn.Parameter:
        data = torch.empty(*rows, width, dtype=torch.uint8, device=runtime.device)
        return nn.Parameter(data, requires_grad=False)

    blocks, scales = empty(columns // 2), empty(columns // GROUP)
    scales.data.fill_(119)  # small finite values for dummy weights
    return blocks, scales


def check_groups(
    shard: Shard, module: str, world_size: int, instead: str = "", ranks: str = "tensor parallel size"
) -> None:
    """Check that a matrix divides into groups, and that a shard consists of whole ones.

    Args:
        shard: of the weight.
        module: its checkpoint module.
        world_size: the number of ranks that share it.
        instead: an alternative for the user, after a comma.
        ranks: the name of the setting of ``world_size``.

    Raises:
        ValueError: it does not.
    """
    mine, total = len(shard.my_columns), shard.columns
    if total % GROUP:
        raise ValueError(
            f"{module} has {total} columns, which is no multiple of {GROUP}, the numbers that share a scale in MXFP4. "
            f"Supported: multiples of {GROUP}, and checkpoints that leave such a module as it is."
        )
    if mine % GROUP:
        sizes = [size for size in range(1, world_size) if total % (size * GROUP) == 0]
        raise ValueError(
            f"{ranks} {world_size} would cut MXFP4 groups of {module}: a rank would hold {mine} of its {total} "
            f"columns, and {GROUP} numbers of a row share a scale. Use a {ranks} that leaves each rank whole groups "
            f"({', '.join(map(str, sizes))}){instead}."
        )


class PackedPlacement(Placement):
    """A weight's blocks."""

    dtypes = ("U8",)

    def dtype_problem(self, dtype: str) -> str | None:
        """See :class:`Placement`."""
        return packed_dtype_problem(dtype)


class PackedScalePlacement(PackedPlacement):
    """A weight's scales."""

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        check_packed_scales(tensor)

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        self.check(tensor)
        super().load(tensor)


def packed_dtype_problem(dtype: str) -> str | None:
    """See :meth:`Placement.dtype_problem`."""
    if dtype == "U8":
        return None
    return f"is stored as {dtype}, but config.json says MXFP4 (U8) and does not leave this module out"


def check_packed_scales(scales: torch.Tensor) -> None:
    """Check that kernels support these scales.

    Raises:
        ValueError: they do not; the message continues the tensor's name.
    """
    if int(scales.max()) > LARGEST:
        raise ValueError(f"holds a scale of more than 2^{LARGEST - 127}, or one that is no number")


def place_packed(shard: Shard, blocks: torch.Tensor, scales: torch.Tensor) -> tuple[Placement, Placement]:
    """This rank's blocks and scales of ``shard``, in those of the whole weight."""

    def of(parameter: torch.Tensor, unit: int, kind: type[Placement]) -> Placement:
        columns = range(shard.my_columns.start // unit, shard.my_columns.stop // unit)
        return replace(shard, columns=shard.columns // unit, my_columns=columns).of_matrix(parameter, kind)

    return of(blocks, 2, PackedPlacement), of(scales, GROUP, PackedScalePlacement)


class Mxfp4Method:
    """See :class:`atom_core.layers.linear_methods.LinearMethod`."""

    def __init__(self, scheme: Mxfp4LinearConfig) -> None:
        self.scheme = scheme

    def create(self, layer: Linear, runtime: Runtime) -> None:
        """Register the weight's blocks and their scales.

        Raises:
            ValueError: groups would be cut.
        """
        for shard, module in zip(layer.shards, layer.shard_modules, strict=True):
            check_groups(shard, module, runtime.tensor_parallel.world_size)
        bias, rounded = layer.bias is not None, self.scheme.rounded_inputs
        self.spec = Mxfp4LinearSpec(layer.in_features, layer.out_features, bias, rounded, runtime.dtype)
        self.kernel = runtime.kernels.select(MXFP4_LINEAR, self.spec)
        self.few_rows_kernel = self.kernel if isinstance(self.kernel, FewRowsMxfp4Kernel) else None
        layer.weight, layer.weight_scale = empty_packed(runtime, layer.out_features, layer.in_features)

    def placements(self, layer: Linear, shard: Shard) -> Iterator[tuple[str, Placement]]:
        """The blocks and their scales."""
        blocks, scales = place_packed(shard, layer.weight, layer.weight_scale)
        yield "weight", blocks
        yield "weight_scale", scales

    def input_form(self) -> InputForm | None:
        """See :class:`LinearMethod`."""
        return None

    def takes_quantized(self, rows: int) -> bool:
        """See :class:`LinearMethod`."""
        return False

    def apply(self, layer: Linear, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`LinearMethod`."""
        assert isinstance(x, torch.Tensor)
        return self.kernel(x, layer.weight, layer.weight_scale, bias)

    def add(
        self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """See :class:`LinearMethod`."""
        if self.few_rows_kernel is None or not 0 < x.shape[0] <= self.few_rows_kernel.max_rows:
            return None
        return self.few_rows_kernel.add(x, layer.weight, layer.weight_scale, bias, residual)

    def chosen(self, layer: Linear, kernels: KernelSet) -> tuple[str, str]:
        """See :class:`LinearMethod`."""
        return MXFP4_LINEAR.name, kernels.chosen(MXFP4_LINEAR, self.spec)

    def operands(self, layer: Linear) -> Operands:
        """See :class:`LinearMethod`."""
        return Operands(layer.weight, layer.bias, layer.weight_scale, rounded_inputs=self.scheme.rounded_inputs)

    def finalize(self, layer: Linear) -> None:
        """Give the weight to the kernel, which may reorder its bytes."""
        self.kernel.adopt(layer.weight, layer.weight_scale)

    def restore(self, layer: Linear, whole: bool) -> None:
        """See :class:`LinearMethod`."""
        if isinstance(self.kernel, MovingKernel) and not whole:
            self.kernel.move_back(layer.weight)
