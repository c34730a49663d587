"""The experts of a mixture in FP8, from a checkpoint with matrix, row or block scales, or quantised on loading.

Each token has a dynamic input scale, also where the checkpoint has static ones. Tokens are quantised once for all
experts, so a layer could use only the largest of its experts' static scales; a dynamic scale costs nothing extra there,
clips nothing and is finer. So static scales are required and checked, but not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from atom_core.kernels.fp8_experts import FP8_EXPERTS, Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.moved import MovingKernel
from atom_core.layers.block_fp8 import check_blocks, num_blocks, place_scales
from atom_core.layers.expert_shards import expert_shards
from atom_core.layers.linear_methods import (
    Fp8Placement,
    QuantizingPlacement,
    ScalePlacement,
    Shard,
    UnusedScalePlacement,
    empty_fp8,
    empty_scales,
)
from atom_core.layers.parameters import Placement, checkpoint_module
from atom_core.quant.fp8 import Fp8Config
from atom_core.runtime import Runtime
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.layers.experts import Experts


class Fp8ExpertsMethod:
    """See :class:`atom_core.layers.experts.ExpertsMethod`.

    Args:
        scheme: of the layer.
        module: the checkpoint module of the experts.
    """

    def __init__(self, scheme: Fp8Config, module: str) -> None:
        self.scheme, self.module = scheme, module

    def create(self, layer: Experts, activation: Activation, top_k: int, runtime: Runtime, name: str) -> None:
        """Register the parameters.

        Raises:
            ValueError: this rank's share would cut blocks, or checkpoints have all experts in one tensor.
        """
        if layer.fused:
            raise ValueError(
                f"The experts of {self.module} are all in one tensor a matrix, which is not supported in FP8. Leave "
                "--quantization fp8 out, or serve the checkpoint that has its experts in MXFP4."
            )
        count, size = len(layer.local_experts), len(layer.intermediate_range)
        hidden, block = layer.hidden_size, self.scheme.block
        if block:
            instead = ", or share out whole experts (expert parallelism)"
            for _, shard in expert_shards(layer, layer.local_experts.start):
                check_blocks(shard, checkpoint_module(name, shard.module), layer.num_ranks, instead, layer.ranks)
        layer.gate_up_proj = empty_fp8(runtime, count, 2 * size, hidden)
        layer.down_proj = empty_fp8(runtime, count, hidden, size)
        wide: tuple[int, ...] = (2 * size,)
        narrow: tuple[int, ...] = (hidden,)
        if block:
            wide, narrow = (num_blocks(2 * size), num_blocks(hidden)), (num_blocks(hidden), num_blocks(size))
        layer.gate_up_scale = empty_scales(runtime, count, *wide)
        layer.down_scale = empty_scales(runtime, count, *narrow)
        first, total, shared = layer.local_experts.start, layer.total, layer.total - layer.routed
        spec = Fp8ExpertsSpec(first, count, hidden, size, top_k, activation, block, runtime.dtype, total, shared)
        self.kernel = runtime.kernels.select(FP8_EXPERTS, spec)

    def weights(self, layer: Experts) -> Fp8ExpertWeights:
        """See :class:`atom_core.layers.experts.ExpertsMethod`."""
        return Fp8ExpertWeights(layer.gate_up_proj, layer.gate_up_scale, layer.down_proj, layer.down_scale)

    def placements(self, layer: Experts) -> Iterator[tuple[str, str, Placement]]:
        """Three matrices per expert, and the scales of each."""
        for index, expert in enumerate(layer.local_experts):
            for ours, shard in expert_shards(layer, expert):
                weight, scale = (getattr(layer, f"{ours}_{what}")[index] for what in ("proj", "scale"))
                for name, kept_in, placement in self._of_shard(shard, weight, scale):
                    yield shard.module, name, replace(placement, parameter_name=f"{ours}_{kept_in}")

    def _of_shard(
        self, shard: Shard, weight: torch.Tensor, scale: torch.Tensor
    ) -> Iterator[tuple[str, str, Placement]]:
        """(tensor name, suffix of the parameter, placement)."""
        if not self.scheme.serialized:
            yield "weight", "proj", QuantizingPlacement.of(shard, weight, scale)
            return
        yield "weight", "proj", shard.of_matrix(weight, Fp8Placement)
        in_blocks = self.scheme.block
        placement = place_scales(shard, scale) if in_blocks else shard.of_rows(scale, ScalePlacement)
        yield self.scheme.scale, "scale", placement
        if self.scheme.input_scale == "static":
            yield "input_scale", "scale", UnusedScalePlacement(scale, (1,))

    def finalize(self, layer: Experts) -> None:
        """Called after loading, and again after new weights were loaded."""
        self.kernel.adopt(self.weights(layer))

    def restore(self, layer: Experts, whole: bool) -> None:
        """See :class:`atom_core.layers.experts.ExpertsMethod`."""
        if isinstance(self.kernel, MovingKernel) and not whole:
            self.kernel.move_back(layer.gate_up_proj, layer.down_proj)
