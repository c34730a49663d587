"""Linear layers and their shards in a tensor-parallel group.

Column-parallel layers have a shard of the outputs, row-parallel ones a shard of the inputs and a sum over ranks
(Megatron-LM, arXiv 1909.08053). Merged layers have several checkpoint tensors in one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atom_core.config import NO_PADDING, Padding
from atom_core.kernels.fp8_inputs import LinearInput
from atom_core.kernels.linear import LinearKernel, LinearSpec
from atom_core.layers.block_fp8 import BlockFp8Method
from atom_core.layers.linear_methods import Fp8Method, LinearMethod, Shard, UnquantizedMethod
from atom_core.layers.mxfp4_linear import Mxfp4Method
from atom_core.layers.parameters import (
    ParameterLayer,
    Placement,
    checkpoint_module,
    empty_parameter,
    one_a_tensor,
    share,
)
from atom_core.quant import LinearScheme, Mxfp4LinearConfig
from atom_core.runtime import Runtime


def method_of(scheme: LinearScheme | None) -> LinearMethod:
    """The method of ``scheme``; None: not quantised."""
    if scheme is None:
        return UnquantizedMethod()
    if isinstance(scheme, Mxfp4LinearConfig):
        return Mxfp4Method(scheme)
    return BlockFp8Method(scheme) if scheme.block else Fp8Method(scheme)


class Linear(ParameterLayer):
    """``y = x W^T + b`` with this rank's ``W [out, in]``, quantised as the runtime says.

    Args:
        in_features: columns of ``W``.
        out_features: rows of ``W``.
        bias: whether there is ``b``.
        runtime: the model's.
        name: this module's name in checkpoints, by which a quantisation may exclude it.
        shards: the checkpoint matrices in ``W``, and this rank's shard of each; None: one whole matrix.
        float32_result: whether the result is in float32; only for layers that are not quantised.
    """

    weight: nn.Parameter
    #: Not quantised: the spec of the kernel, and the kernel.
    spec: LinearSpec
    kernel: LinearKernel
    #: Quantised: a scale per row, block or group, and the input's where it is static.
    weight_scale: nn.Parameter
    input_scale: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        runtime: Runtime,
        name: str = "",
        shards: Sequence[Shard] | None = None,
        float32_result: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.float32_result = float32_result
        whole = Shard("", out_features, in_features, range(out_features), range(in_features))
        self.shards = (whole,) if shards is None else tuple(shards)
        self.bias = empty_parameter(runtime, out_features) if bias else None
        #: The checkpoint module of each shard.
        self.shard_modules = [checkpoint_module(name, shard.module) for shard in self.shards]
        scheme = runtime.quant.linear(self.shard_modules)
        self.quantized = scheme is not None
        assert not (self.quantized and float32_result)
        self.method = method_of(scheme)
        self.method.create(self, runtime)

    def forward(self, x: LinearInput) -> torch.Tensor:
        """``x [T, in]``, possibly quantised in the method's input form, to ``[T, out]``."""
        return self.method.apply(self, x, self.bias)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The method's tensors of each shard, and the bias; a checkpoint tensor may have several shards."""
        yield from one_a_tensor(self._placements())

    def _placements(self) -> Iterator[tuple[str, str, Placement]]:
        for shard in self.shards:
            for name, placement in self.method.placements(self, shard):
                yield shard.module, name, placement
            if self.bias is not None:
                yield shard.module, "bias", shard.of_rows(self.bias)

    def finalize_weights(self) -> None:
        """See :class:`ParameterLayer`."""
        self.method.finalize(self)

    def restore_weights(self, whole: bool) -> None:
        """See :class:`ParameterLayer`."""
        self.method.restore(self, whole)


@dataclass(frozen=True)
class Column:
    """Rows of a checkpoint tensor in a merged weight: its name, its rows in the checkpoint, and those taken here.

    Rows past the checkpoint's are zeros.
    """

    name: str
    rows: int
    local: range


class MergedColumnLinear(Linear):
    """Column-parallel layers with the same input as one weight; in checkpoints they are siblings of this module."""

    def __init__(
        self, in_features: int, columns: Sequence[Column], bias: bool, runtime: Runtime, name: str = ""
    ) -> None:
        shards: list[Shard] = []
        begin = 0
        for column in columns:
            shards.append(Shard(f"../{column.name}", column.rows, in_features, column.local, range(in_features), begin))
            begin += len(column.local)
        super().__init__(in_features, begin, bias, runtime, name, shards)


class QkvLinear(MergedColumnLinear):
    """Query, key and value projections. With more ranks than key/value heads, the heads are replicated.

    Args:
        hidden_size: of the input.
        num_heads, num_kv_heads, head_dim: of all ranks.
        bias: whether there is one.
        runtime: the model's.
        name: see :class:`Linear`.
        padding: the heads that checkpoints do not have.
        output_gate: whether ``q_proj`` has a gate behind each head's query. Here gates are last, behind v.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        runtime: Runtime,
        name: str = "",
        padding: Padding = NO_PADDING,
        output_gate: bool = False,
    ) -> None:
        group = runtime.tensor_parallel
        heads = share(num_heads, group.rank, group.world_size, "num_attention_heads")
        kv_heads = kv_share(num_kv_heads, group.rank, group.world_size)

        def column(name: str, stored: int, mine: range) -> Column:
            return Column(name, stored * head_dim, range(mine.start * head_dim, mine.stop * head_dim))

        stored_heads, stored_kv_heads = num_heads - padding.heads, num_kv_heads - padding.kv_heads
        queries, gates = [column("q_proj", stored_heads, heads)], []
        if output_gate:
            queries = [column("q_proj", 2 * stored_heads, range(2 * head, 2 * head + 1)) for head in heads]
            gates = [column("q_proj", 2 * stored_heads, range(2 * head + 1, 2 * head + 2)) for head in heads]
        cached = [column(name, stored_kv_heads, kv_heads) for name in ("k_proj", "v_proj")]
        super().__init__(hidden_size, [*queries, *cached, *gates], bias, runtime, name)
        self.num_heads = len(heads)
        self.num_kv_heads = len(kv_heads)


def kv_share(num_kv_heads: int, rank: int, world_size: int) -> range:
    """This rank's key/value heads; with more ranks than heads, several ranks have the same head.

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
    """A layer whose input is sharded over ranks; results are summed over ranks if ``reduce_results``.

    The last ``padding`` of the ``in_features`` columns are zeros that checkpoints do not have.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        runtime: Runtime,
        what: str,
        name: str = "",
        padding: int = 0,
        reduce_results: bool = True,
    ) -> None:
        group = runtime.tensor_parallel
        mine = share(in_features, group.rank, group.world_size, what)
        shard = Shard("", out_features, in_features - padding, range(out_features), mine)
        super().__init__(len(mine), out_features, bias, runtime, name, [shard])
        self.group, self.mine, self.reduce_results = group, mine, reduce_results

    def forward(self, x: LinearInput) -> torch.Tensor:
        """``x [T, in / ranks]``, this rank's columns, to ``[T, out]``."""
        y = self.partial(x)
        return self.group.all_reduce(y) if self.reduce_results else y

    def partial(self, x: LinearInput) -> torch.Tensor:
        """This rank's partial sum, without the sum over ranks."""
        # Every rank has the whole bias, which must enter the sum once.
        return self.method.apply(self, x, self.bias if self.group.rank == 0 else None)
