"""How a mixture's experts are kept where the checkpoint has them in MXFP4: packed, as they come.

Checkpoints (GPT-OSS's) have ``gate_up_proj_blocks [E, 2I, H / 32, 16]`` and ``gate_up_proj_scales [E, 2I, H / 32]``,
gates and ups in turn, and the same of down, ``[E, H, I / 32, ..]``, all uint8; biases as in unquantised ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom_core.config import Activation
from atom_core.kernels.experts import ExpertsSpec
from atom_core.kernels.mxfp4_experts import GROUP, MXFP4_EXPERTS, Mxfp4Weights
from atom_core.layers.fused_experts import MiddlePlacement, PairsPlacement
from atom_core.layers.norm import RMSNorm
from atom_core.layers.parameters import Placement
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from atom_core.layers.experts import Experts

#: The largest scale, 2 ** 113: kernels have what is 2 ** 14 times larger in float32.
_LARGEST = 240


class Mxfp4ExpertsMethod:
    """See :class:`atom_core.layers.experts.ExpertsMethod`."""

    def create(self, layer: Experts, activation: Activation, top_k: int, runtime: Runtime, name: str) -> None:
        """Register the parameters.

        Raises:
            ValueError: groups that share a scale do not divide among ranks, or a matrix into groups.
        """
        assert layer.fused, "only GPT-OSS's checkpoints are read"
        hidden, ranks = layer.hidden_size, layer.num_ranks
        for name, size in (("hidden_size", hidden), ("intermediate_size", layer.size)):
            if size % GROUP:
                raise ValueError(f"{name}={size} is no multiple of {GROUP}, the numbers that share a scale in MXFP4.")
        count, size = len(layer.held), len(layer.mine)
        if size % GROUP:
            possible = [it for it in range(1, ranks) if layer.size % (it * GROUP) == 0]
            raise ValueError(
                f"{layer.ranks} {ranks} gives each rank {size} of intermediate_size={layer.size}, but in MXFP4 "
                f"{GROUP} numbers share a scale and stay together; use one of {possible}, or share experts out whole "
                "(--enable-expert-parallel in vLLM, --ep-size in SGLang)."
            )

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=runtime.device), requires_grad=False)

        layer.gate_up_proj_blocks = empty(count, 2 * size, hidden // 2)
        layer.gate_up_proj_scales = empty(count, 2 * size, hidden // GROUP)
        layer.down_proj_blocks = empty(count, hidden, size // 2)
        layer.down_proj_scales = empty(count, hidden, size // GROUP)
        for scales in (layer.gate_up_proj_scales, layer.down_proj_scales):
            scales.data.fill_(119)  # where weights are made up, they are numbers, and small
        bias = layer.gate_up_proj_bias is not None
        spec = ExpertsSpec(layer.held.start, count, hidden, size, top_k, activation, bias, runtime.dtype)
        self.kernel = runtime.kernels.select(MXFP4_EXPERTS, spec)

    def apply(self, layer: Experts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See :meth:`atom_core.layers.experts.Experts.forward`."""
        gate_up = (layer.gate_up_proj_blocks, layer.gate_up_proj_scales)
        down = (layer.down_proj_blocks, layer.down_proj_scales)
        return self.kernel(x, weights, experts, Mxfp4Weights(*gate_up, *down, *layer.biases))

    def add(
        self, layer: Experts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """No kernel does both."""
        return None

    def max_normed(self) -> int:
        """No kernel norms in front."""
        return 0

    def add_behind_norm(
        self, layer: Experts, stream: torch.Tensor, norm: RMSNorm, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`max_normed`."""
        raise AssertionError("no kernel norms in front")

    def placements(self, layer: Experts) -> Iterator[tuple[str, str, Placement]]:
        """Blocks and scales, without the biases."""
        total, hidden, held, mine = layer.total, layer.hidden_size, layer.held, layer.mine
        for kind, unit, last in (("blocks", 2, (16,)), ("scales", GROUP, ())):
            gate_up = (total, 2 * layer.size, hidden // GROUP, *last)
            parameter = layer.get_parameter(f"gate_up_proj_{kind}")
            yield "", f"gate_up_proj_{kind}", PackedPairs(parameter, gate_up, share=(held, mine))
            down = (total, hidden, layer.size // GROUP, *last)
            columns = range(mine.start // unit, mine.stop // unit)
            parameter = layer.get_parameter(f"down_proj_{kind}")
            yield "", f"down_proj_{kind}", PackedMiddle(parameter, down, share=(held, columns))

    def finalize(self, layer: Experts) -> None:
        """Nothing to bring into another form."""


@dataclass(frozen=True, kw_only=True)
class PackedPairs(PairsPlacement):
    """Blocks or scales of gate and up."""

    dtypes = ("U8",)

    def dtype_problem(self, dtype: str) -> str | None:
        """See :class:`Placement`."""
        return _dtype_problem(dtype)

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[2I, H / 32, ..]`` to ``[2I, ..]``."""
        super().load_expert(mine, _checked(whole).transpose(0, 1))


@dataclass(frozen=True, kw_only=True)
class PackedMiddle(MiddlePlacement):
    """Blocks or scales of down."""

    dtypes = ("U8",)

    def dtype_problem(self, dtype: str) -> str | None:
        """See :class:`Placement`."""
        return _dtype_problem(dtype)

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[H, I / 32, ..]`` to ``[H, ..]``."""
        super().load_expert(mine, _checked(whole).transpose(0, 1))


def _dtype_problem(dtype: str) -> str | None:
    return None if dtype == "U8" else f"is stored as {dtype}, but config.json says MXFP4 (U8)"


def _checked(whole: torch.Tensor) -> torch.Tensor:
    """``[rows, bytes]`` of an expert's blocks or scales."""
    if whole.dim() == 2 and int(whole.max()) > _LARGEST:
        raise ValueError(f"holds a scale of more than 2^{_LARGEST - 127}, or one that is no number")
    return whole.flatten(1)
