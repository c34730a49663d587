"""A mixture's experts in the model's dtype; see :class:`atom_core.layers.experts.ExpertsMethod`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from atom_core.kernels.experts import EXPERTS, ExpertsSpec, ExpertWeights, PackingExpertsKernel
from atom_core.kernels.moved import MovingKernel
from atom_core.layers.expert_shards import expert_shards
from atom_core.layers.fused_experts import DownPlacement, GateUpPlacement
from atom_core.layers.parameters import Placement, empty_parameter
from atom_core.runtime import Runtime
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.layers.experts import Experts


class PlainExpertsMethod:
    """See the module."""

    def create(self, layer: Experts, activation: Activation, top_k: int, runtime: Runtime, name: str) -> None:
        """Register the parameters."""
        count, size, hidden = len(layer.local_experts), len(layer.intermediate_range), layer.hidden_size
        layer.gate_up_proj = empty_parameter(runtime, count, 2 * size, hidden)
        layer.down_proj = empty_parameter(runtime, count, hidden, size)
        bias = layer.gate_up_proj_bias is not None
        shared = layer.total - layer.routed
        spec = ExpertsSpec(
            layer.local_experts.start, count, hidden, size, top_k, activation, bias, runtime.dtype, layer.total, shared
        )
        self.kernel = runtime.kernels.select(EXPERTS, spec)

    def weights(self, layer: Experts) -> ExpertWeights:
        """See :class:`atom_core.layers.experts.ExpertsMethod`."""
        return ExpertWeights(layer.gate_up_proj, layer.down_proj, *layer.biases)

    def placements(self, layer: Experts) -> Iterator[tuple[str, str, Placement]]:
        """Three matrices per expert, or two tensors for all of them."""
        return _fused(layer) if layer.fused else _one_by_one(layer)

    def finalize(self, layer: Experts) -> None:
        """Called after loading, and again after new weights were loaded."""
        if self.kernel.adopt(self.weights(layer)):
            for parameter in (layer.gate_up_proj, layer.down_proj):
                parameter.data = parameter.new_empty(len(parameter), 0, 0)

    def restore(self, layer: Experts, whole: bool) -> None:
        """See :class:`atom_core.layers.experts.ExpertsMethod`."""
        gate_up, down, kernel = layer.gate_up_proj, layer.down_proj, self.kernel
        count, size, hidden = len(layer.local_experts), len(layer.intermediate_range), layer.hidden_size
        if gate_up.numel():
            if isinstance(kernel, MovingKernel) and not whole:
                kernel.move_back(gate_up, down)
        elif whole:
            gate_up.data, down.data = gate_up.new_empty(count, 2 * size, hidden), down.new_empty(count, hidden, size)
        else:
            assert isinstance(kernel, PackingExpertsKernel), "a kernel that keeps weights alone can give them back"
            gate_up.data, down.data = kernel.unpacked()


def _one_by_one(layer: Experts) -> Iterator[tuple[str, str, Placement]]:
    for index, expert in enumerate(layer.local_experts):
        for ours, shard in expert_shards(layer, expert):
            placement = shard.of_matrix(layer.get_parameter(f"{ours}_proj")[index])
            yield shard.module, "weight", replace(placement, parameter_name=f"{ours}_proj")


def _fused(layer: Experts) -> Iterator[tuple[str, str, Placement]]:
    total, hidden, size = layer.total, layer.hidden_size, layer.intermediate_size
    share = (layer.local_experts, layer.intermediate_range)
    yield "", "gate_up_proj", GateUpPlacement(layer.gate_up_proj, (total, hidden, 2 * size), share=share)
    yield "", "down_proj", DownPlacement(layer.down_proj, (total, size, hidden), share=share)
