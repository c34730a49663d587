"""The experts of a mixture whose checkpoint has them in MXFP4, which stay packed.

GPT-OSS's checkpoints have ``gate_up_proj_blocks [E, 2I, H / 32, 16]`` and ``gate_up_proj_scales [E, 2I, H / 32]``, gate
and up alternating, and the same for down, ``[E, H, I / 32, ..]``, all uint8; biases are as in unquantised ones. Other
checkpoints have three matrices per expert, each as in :mod:`atom_core.layers.mxfp4_linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom_core.kernels.moved import MovingKernel
from atom_core.kernels.mxfp4_experts import (
    MXFP4_EXPERTS,
    Mxfp4ExpertsSpec,
    Mxfp4Weights,
    empty_scales,
)
from atom_core.layers.expert_shards import expert_shards
from atom_core.layers.fused_experts import DownPlacement, GateUpPlacement
from atom_core.layers.mxfp4_linear import (
    check_groups,
    check_packed_scales,
    empty_packed,
    packed_dtype_problem,
    place_packed,
)
from atom_core.layers.parameters import Placement
from atom_core.quant.mxfp4 import GROUP, Mxfp4Config, Mxfp4LinearConfig
from atom_core.runtime import Runtime
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.layers.experts import Experts


class Mxfp4ExpertsMethod:
    """See :class:`atom_core.layers.experts.ExpertsMethod`.

    Args:
        scheme: of all experts' matrices at once, or of each.
        module: the checkpoint module of the experts.
    """

    def __init__(self, scheme: Mxfp4Config | Mxfp4LinearConfig, module: str) -> None:
        self.one_by_one, self.module = isinstance(scheme, Mxfp4LinearConfig), module
        self.rounded_inputs = isinstance(scheme, Mxfp4LinearConfig) and scheme.rounded_inputs

    def create(self, layer: Experts, activation: Activation, top_k: int, runtime: Runtime, name: str) -> None:
        """Register the parameters.

        Raises:
            ValueError: scale groups do not divide among ranks, or a matrix into groups; or the model's checkpoints have
                all experts in one tensor, which the scheme does not support.
        """
        if layer.fused and self.one_by_one:
            raise ValueError(
                f"The experts of {self.module} are all in one tensor a matrix, which MXFP4 of AMD Quark does not "
                "support. Supported: checkpoints of quant_method mxfp4 for such models."
            )
        assert layer.fused or self.one_by_one, "the model was checked when the configuration was read"
        instead = ", or share out whole experts (--enable-expert-parallel in vLLM, --ep-size in SGLang)"
        for _, shard in expert_shards(layer, layer.local_experts.start):
            matrix = shard.module.rpartition(".")[2]
            check_groups(shard, f"{self.module}.{matrix}", layer.num_ranks, instead, layer.ranks)
        count, size, hidden = len(layer.local_experts), len(layer.intermediate_range), layer.hidden_size
        layer.gate_up_proj_blocks, layer.gate_up_proj_scales = _empty(runtime, count, 2 * size, hidden)
        layer.down_proj_blocks, layer.down_proj_scales = _empty(runtime, count, hidden, size)
        bias, rounded = layer.gate_up_proj_bias is not None, self.rounded_inputs
        share = (layer.local_experts.start, count, hidden, size, top_k)
        spec = Mxfp4ExpertsSpec(*share, activation, bias, runtime.dtype, layer.total, rounded_inputs=rounded)
        self.kernel = runtime.kernels.select(MXFP4_EXPERTS, spec)

    def weights(self, layer: Experts) -> Mxfp4Weights:
        """See :class:`atom_core.layers.experts.ExpertsMethod`."""
        gate_up = (layer.gate_up_proj_blocks, layer.gate_up_proj_scales)
        return Mxfp4Weights(*gate_up, layer.down_proj_blocks, layer.down_proj_scales, *layer.biases)

    def placements(self, layer: Experts) -> Iterator[tuple[str, str, Placement]]:
        """Blocks and scales, without the biases."""
        return _one_by_one(layer) if self.one_by_one else _fused(layer)

    def finalize(self, layer: Experts) -> None:
        """Give the weights to the kernel, which may reorder their bytes."""
        self.kernel.adopt(self.weights(layer))

    def restore(self, layer: Experts, whole: bool) -> None:
        """See :class:`atom_core.layers.experts.ExpertsMethod`."""
        if isinstance(self.kernel, MovingKernel) and not whole:
            self.kernel.move_back(layer.gate_up_proj_blocks, layer.down_proj_blocks)


def _empty(runtime: Runtime, count: int, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Blocks and scales of a weight, to be loaded; the scales in the memory order of kernels."""
    blocks, scales = empty_packed(runtime, count, rows, columns)
    ordered = empty_scales(count, rows, columns, runtime.device).copy_(scales)
    return blocks, nn.Parameter(ordered, requires_grad=False)


def _one_by_one(layer: Experts) -> Iterator[tuple[str, str, Placement]]:
    for index, expert in enumerate(layer.local_experts):
        for ours, shard in expert_shards(layer, expert):
            kept_in = [f"{ours}_proj_{what}" for what in ("blocks", "scales")]
            packed = place_packed(shard, *(layer.get_parameter(name)[index] for name in kept_in))
            for name, parameter_name, placement in zip(("weight", "weight_scale"), kept_in, packed, strict=True):
                yield shard.module, name, replace(placement, parameter_name=parameter_name)


def _fused(layer: Experts) -> Iterator[tuple[str, str, Placement]]:
    total, hidden, local_experts, mine = layer.total, layer.hidden_size, layer.local_experts, layer.intermediate_range
    for kind, unit, last in (("blocks", 2, (16,)), ("scales", GROUP, ())):
        gate_up = (total, 2 * layer.intermediate_size, hidden // GROUP, *last)
        parameter = layer.get_parameter(f"gate_up_proj_{kind}")
        yield "", f"gate_up_proj_{kind}", PackedGateUpPlacement(parameter, gate_up, share=(local_experts, mine))
        down = (total, hidden, layer.intermediate_size // GROUP, *last)
        columns = range(mine.start // unit, mine.stop // unit)
        parameter = layer.get_parameter(f"down_proj_{kind}")
        yield "", f"down_proj_{kind}", PackedDownPlacement(parameter, down, share=(local_experts, columns))


@dataclass(frozen=True, kw_only=True)
class PackedGateUpPlacement(GateUpPlacement):
    """Blocks or scales of gate and up."""

    dtypes = ("U8",)

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        _check(tensor)

    def dtype_problem(self, dtype: str) -> str | None:
        """See :class:`Placement`."""
        return packed_dtype_problem(dtype)

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[2I, H / 32, ..]`` to ``[2I, ..]``."""
        super().load_expert(mine, _checked(whole).transpose(0, 1))

    def store_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """Undo :meth:`load_expert`."""
        super().store_expert(mine, whole.flatten(1).transpose(0, 1))


@dataclass(frozen=True, kw_only=True)
class PackedDownPlacement(DownPlacement):
    """Blocks or scales of down."""

    dtypes = ("U8",)

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        _check(tensor)

    def dtype_problem(self, dtype: str) -> str | None:
        """See :class:`Placement`."""
        return packed_dtype_problem(dtype)

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[H, I / 32, ..]`` to ``[H, ..]``."""
        super().load_expert(mine, _checked(whole).transpose(0, 1))

    def store_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """Undo :meth:`load_expert`."""
        super().store_expert(mine, whole.flatten(1).transpose(0, 1))


def _check(experts: torch.Tensor) -> None:
    """Check scales ``[E, rows, groups]``; blocks ``[E, rows, groups, 16]`` may have any bits."""
    if experts.dim() == 3:
        check_packed_scales(experts)


def _checked(whole: torch.Tensor) -> torch.Tensor:
    """``[rows, bytes]`` of an expert's blocks or scales."""
    if whole.dim() == 2:
        check_packed_scales(whole)
    return whole.flatten(1)
