"""The experts of a mixture, and the forms of their weights: in the model's dtype, in FP8 or in MXFP4.

A rank has a shard of every expert's intermediate size, or, with expert parallelism, some of the experts. Shared experts
may be among them, after the routed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn

from atom_core.config import MoEConfig
from atom_core.kernels.experts import AddingExpertsKernel
from atom_core.layers.fp8_experts import Fp8ExpertsMethod
from atom_core.layers.fused_experts import GateUpPlacement
from atom_core.layers.mxfp4_experts import Mxfp4ExpertsMethod
from atom_core.layers.parameters import (
    ParameterLayer,
    Placement,
    checkpoint_module,
    empty_parameter,
    one_a_tensor,
    share,
)
from atom_core.layers.plain_experts import PlainExpertsMethod
from atom_core.quant import Mxfp4Config, Mxfp4LinearConfig
from atom_core.runtime import Runtime
from atom_core.types import Activation


class ExpertsMethod(Protocol):
    """One form of the weights; one object per layer."""

    kernel: Any
    """The kernel, once created: like :class:`atom_core.kernels.experts.ExpertsKernel`, for :meth:`weights`."""

    def create(self, layer: Experts, activation: Activation, top_k: int, runtime: Runtime, name: str) -> None:
        """Register the weights; ``layer``, the module ``name``, has its sizes, this rank's share and the biases.

        Raises:
            ValueError: the weights cannot be shared out this way.
        """

    def weights(self, layer: Experts) -> Any:
        """The layer's weights for the kernel."""

    def placements(self, layer: Experts) -> Iterator[tuple[str, str, Placement]]:
        """As :meth:`atom_core.layers.parameters.ParameterLayer.placements`, without the biases."""

    def finalize(self, layer: Experts) -> None:
        """Called after loading, and again after new weights were loaded."""

    def restore(self, layer: Experts, whole: bool) -> None:
        """See :meth:`ParameterLayer.restore_weights`."""


class Experts(ParameterLayer):
    """All experts of a layer, each matrix in one tensor; checkpoints have one tensor per expert, or two for all."""

    #: In the model's dtype or FP8: ``[experts, gates and ups, hidden]`` and ``[experts, hidden, intermediate size]``.
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    #: In FP8: see :mod:`atom_core.kernels.fp8_experts`.
    gate_up_scale: nn.Parameter
    down_scale: nn.Parameter
    #: In MXFP4: see :mod:`atom_core.layers.mxfp4_experts`.
    gate_up_proj_blocks: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    down_proj_blocks: nn.Parameter
    down_proj_scales: nn.Parameter

    def __init__(
        self, config: MoEConfig, hidden_size: int, activation: Activation, runtime: Runtime, name: str
    ) -> None:
        super().__init__()
        self.names, self.fused = config.names, config.fused
        group, data_parallel, routing = runtime.tensor_parallel, runtime.data_parallel, config.routing
        self.hidden_size, self.intermediate_size = hidden_size, config.intermediate_size
        #: Numbers of experts: routed ones, and all including the shared ones after them.
        self.routed, self.total = routing.num_experts, routing.total_experts
        rank = data_parallel.rank * group.world_size + group.rank
        self.num_ranks = data_parallel.world_size * group.world_size
        #: The name of the number of ranks for users.
        self.ranks = "tensor parallel size" if data_parallel.world_size == 1 else "tensor times data parallel size"
        #: This rank's experts, and its range of the intermediate size of each.
        self.local_experts, self.intermediate_range = range(self.total), range(self.intermediate_size)
        assert not (routing.shared and (runtime.expert_parallel or config.fused or config.bias))
        if runtime.expert_parallel:
            self.local_experts = share(self.total, rank, self.num_ranks, "num_experts", self.ranks)
        else:
            what = "moe_intermediate_size"
            self.intermediate_range = share(self.intermediate_size, rank, self.num_ranks, what, self.ranks)
        count, size = len(self.local_experts), len(self.intermediate_range)
        assert config.fused or not config.bias, "biases are known of checkpoints with fused experts alone"
        self.gate_up_proj_bias = empty_parameter(runtime, count, 2 * size) if config.bias else None
        self.down_proj_bias = empty_parameter(runtime, count, hidden_size) if config.bias else None
        #: Where several ranks share an expert, one of them adds the down bias.
        self.adds_bias = runtime.expert_parallel or rank == 0
        self.method = self._method(runtime, name)
        self.method.create(self, activation, routing.experts_per_token, runtime, name)
        kernel = self.method.kernel
        self.adding: AddingExpertsKernel[Any] | None = kernel if isinstance(kernel, AddingExpertsKernel) else None

    def _method(self, runtime: Runtime, name: str) -> ExpertsMethod:
        base, matrices = checkpoint_module(name, self.folder), (self.names.gate, self.names.up, self.names.down)
        if isinstance(runtime.quant, Mxfp4Config):
            runtime.quant.experts(base, matrices, self.routed)
            return Mxfp4ExpertsMethod(runtime.quant, base)
        if self.fused:
            scheme = runtime.quant.linear([f"{base}.{matrix}" for matrix in matrices])
        else:
            scheme = runtime.quant.experts(base, matrices, self.routed)
        if scheme is None:
            return PlainExpertsMethod()
        return (
            Mxfp4ExpertsMethod(scheme, base)
            if isinstance(scheme, Mxfp4LinearConfig)
            else Fp8ExpertsMethod(scheme, base)
        )

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]``, weights and experts ``[T, k]`` to this rank's partial sum, ``[T, hidden]``."""
        return cast(torch.Tensor, self.method.kernel(x, weights, experts, self.method.weights(self)))

    def add(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """Add this rank's sum to ``residual [T, hidden]`` in place; None: no kernel does both."""
        if self.adding is None or torch.compiler.is_compiling():
            return None
        return self.adding.add(x, weights, experts, self.method.weights(self), residual)

    @property
    def max_normed(self) -> int:
        """Largest number of tokens for :meth:`add_normed`."""
        return 0 if self.adding is None else self.adding.max_normed

    def add_normed(
        self, stream: torch.Tensor, norm: torch.Tensor, eps: float, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Add this rank's sum for the normed ``stream [T, hidden]`` to ``stream`` in place."""
        assert self.adding is not None
        return self.adding.add_after_norm(stream, norm, eps, weights, experts, self.method.weights(self))

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gate/up bias, and the down bias where this rank adds it."""
        return self.gate_up_proj_bias, self.down_proj_bias if self.adds_bias else None

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The weights, and the biases."""
        yield from one_a_tensor(self.method.placements(self))
        if self.gate_up_proj_bias is not None and self.down_proj_bias is not None:
            total, local, share = self.total, self.local_experts, (self.local_experts, self.intermediate_range)
            gate_up, down = (total, 2 * self.intermediate_size), (total, self.hidden_size)
            yield "", "gate_up_proj_bias", GateUpPlacement(self.gate_up_proj_bias, gate_up, share=share)
            yield "", "down_proj_bias", Placement(self.down_proj_bias, down, 0, local.start, 0, len(local))

    def other_ranks_modules(self) -> Iterator[str]:
        """Other ranks' experts."""
        return (f"{self.folder}.{expert}" for expert in range(self.total) if expert not in self.local_experts)

    def finalize_weights(self) -> None:
        """See :class:`ParameterLayer`."""
        self.method.finalize(self)

    def restore_weights(self, whole: bool) -> None:
        """See :class:`ParameterLayer`."""
        self.method.restore(self, whole)

    @property
    def folder(self) -> str:
        """The checkpoint module of the experts, relative to this module."""
        return f"../../{self.names.module}.experts"

    @property
    def shared_module(self) -> str:
        """The checkpoint module of the shared experts' network, relative to this module."""
        return f"../../{self.names.module}.{self.names.shared}"
