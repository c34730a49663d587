"""Linear layers and their shares in a tensor-parallel group.

Column-parallel layers hold a slice of the outputs, row-parallel ones a slice of the inputs and sum over ranks
(Megatron-LM, arXiv 1909.08053). Merged layers hold several checkpoint tensors as one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter, share
from atom_core.runtime import Runtime


class Linear(ParameterLayer):
    """``y = x W^T + b`` with this rank's ``W [out, in]``."""

    def __init__(self, in_features: int, out_features: int, bias: bool, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, out_features, in_features)
        self.bias = empty_parameter(runtime, out_features) if bias else None
        self.kernel = runtime.kernels.select(LINEAR, LinearSpec(in_features, out_features, bias, runtime.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        return self.kernel(x, self.weight, self.bias)

    def finalize_weights(self) -> None:
        """Hand the weight to the kernel; where that keeps a form of its own, ours is freed."""
        if self.kernel.adopt(self.weight, self.bias):
            self.weight.data = self.weight.new_empty(0)


@dataclass(frozen=True)
class Column:
    """One checkpoint tensor within a merged weight: its name, its rows there, and which of them are this rank's."""

    name: str
    rows: int
    local: range


class MergedColumnLinear(Linear):
    """Column-parallel layers that read the same input, as one weight."""

    def __init__(self, in_features: int, columns: Sequence[Column], bias: bool, runtime: Runtime) -> None:
        super().__init__(in_features, sum(len(column.local) for column in columns), bias, runtime)
        self.columns = tuple(columns)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """One tensor a column, stored beside this module under the column's name."""
        for name, parameter in self.named_parameters(recurse=False):
            begin = 0
            for column in self.columns:
                count = len(column.local)
                yield (
                    f"../{column.name}",
                    name,
                    Placement(
                        parameter,
                        (column.rows, *parameter.shape[1:]),
                        source=column.local.start,
                        target=begin,
                        count=count,
                    ),
                )
                begin += count


class QkvLinear(MergedColumnLinear):
    """Query, key and value projections. With more ranks than key/value heads, heads are replicated."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, runtime: Runtime
    ) -> None:
        group = runtime.tensor_parallel
        heads = share(num_heads, group.rank, group.world_size, "num_attention_heads")
        kv_heads = kv_share(num_kv_heads, group.rank, group.world_size)

        def column(name: str, total: int, mine: range) -> Column:
            return Column(name, total * head_dim, range(mine.start * head_dim, mine.stop * head_dim))

        columns = (
            column("q_proj", num_heads, heads),
            column("k_proj", num_kv_heads, kv_heads),
            column("v_proj", num_kv_heads, kv_heads),
        )
        super().__init__(hidden_size, columns, bias, runtime)
        self.num_heads = len(heads)
        self.num_kv_heads = len(kv_heads)


def kv_share(num_kv_heads: int, rank: int, world_size: int) -> range:
    """This rank's key/value heads; ranks beyond their number share them in turn.

    Raises:
        ValueError: neither number divides the other.
    """
    if world_size <= num_kv_heads:
        return share(num_kv_heads, rank, world_size, "num_key_value_heads")
    if world_size % num_kv_heads:
        raise ValueError(
            f"tensor parallel size {world_size} is no multiple of num_key_value_heads={num_kv_heads}, "
            "so the heads cannot be shared evenly."
        )
    head = rank // (world_size // num_kv_heads)
    return range(head, head + 1)


class RowLinear(Linear):
    """A layer whose input is split over ranks; the result is summed over them."""

    def __init__(self, in_features: int, out_features: int, bias: bool, runtime: Runtime, what: str) -> None:
        self.group = runtime.tensor_parallel
        mine = share(in_features, self.group.rank, self.group.world_size, what)
        super().__init__(len(mine), out_features, bias, runtime)
        self.in_features = in_features
        self.mine = mine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, in / ranks]`` to ``[T, out]``."""
        # The bias is whole on every rank and must enter the sum once.
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(self.kernel(x, self.weight, bias))

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The weight is split along its inputs, the bias whole."""
        shape = (self.weight.shape[0], self.in_features)
        yield "", "weight", Placement(self.weight, shape, dim=1, source=self.mine.start, count=len(self.mine))
        if self.bias is not None:
            yield "", "bias", Placement(self.bias, tuple(self.bias.shape))
