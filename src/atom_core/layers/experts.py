"""The experts of a mixture, and how they are kept: in the model's dtype, in FP8 or in MXFP4.

A rank holds some of every expert's middle, or, with expert parallelism, some of the experts. Experts that all tokens
share may be among them, behind the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn

from atom_core.config import MoEConfig
from atom_core.kernels.experts import AddingExpertsKernel
from atom_core.layers.expert_parts import one_a_tensor
from atom_core.layers.fp8_experts import Fp8ExpertsMethod
from atom_core.layers.fused_experts import PairsPlacement
from atom_core.layers.mxfp4_experts import Mxfp4ExpertsMethod
from atom_core.layers.parameters import ParameterLayer, Placement, checkpoint_module, empty_parameter, share
from atom_core.layers.plain_experts import PlainExpertsMethod
from atom_core.quant import Mxfp4Config, Mxfp4LinearConfig
from atom_core.runtime import Runtime
from atom_core.types import Activation


class ExpertsMethod(Protocol):
    """One way to keep them; an object a layer."""

    kernel: Any
    """What multiplies, once it is created: as :class:`atom_core.kernels.experts.ExpertsKernel`, of :meth:`weights`."""

    def create(self, layer: Experts, activation: Activation, top_k: int, runtime: Runtime, name: str) -> None:
        """Register the weights; ``layer``, which is the module ``name``, has its sizes, this rank's share and biases.

        Raises:
            ValueError: they cannot be shared out so.
        """

    def weights(self, layer: Experts) -> Any:
        """What the kernel is given of the layer."""

    def placements(self, layer: Experts) -> Iterator[tuple[str, str, Placement]]:
        """As :meth:`atom_core.layers.parameters.ParameterLayer.placements`, without the biases."""

    def finalize(self, layer: Experts) -> None:
        """Called after loading, and again after weights were loaded anew."""

    def restore(self, layer: Experts, whole: bool) -> None:
        """See :meth:`ParameterLayer.restore_weights`."""


class Experts(ParameterLayer):
    """All experts of a layer, each matrix in one tensor; checkpoints have them one by one, or all in two tensors."""

    #: Of the model's dtype or FP8: ``[experts, gates and ups, hidden]`` and ``[experts, hidden, middle]``.
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    #: Where they are FP8: see :mod:`atom_core.kernels.fp8_experts`.
    gate_up_scale: nn.Parameter
    down_scale: nn.Parameter
    #: Where they are in MXFP4: see :mod:`atom_core.layers.mxfp4_experts`.
    gate_up_proj_blocks: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    down_proj_blocks: nn.Parameter
    down_proj_scales: nn.Parameter

    def __init__(
        self, config: MoEConfig, hidden_size: int, activation: Activation, runtime: Runtime, name: str
    ) -> None:
        super().__init__()
        self.names, self.fused = config.names, config.fused
        tp, dp, routing = runtime.tensor_parallel, runtime.data_parallel, config.routing
        self.hidden_size, self.size = hidden_size, config.intermediate_size
        #: Experts that are chosen from, and with the shared ones behind them.
        self.routed, self.total = routing.num_experts, routing.total_experts
        rank, self.num_ranks = dp.rank * tp.world_size + tp.rank, dp.world_size * tp.world_size
        #: What users know the number of ranks by.
        self.ranks = "tensor parallel size" if dp.world_size == 1 else "tensor times data parallel size"
        #: This rank's experts, and what it has of the middle of each.
        self.held, self.mine = range(self.total), range(self.size)
        assert not (routing.shared and (runtime.expert_parallel or config.fused or config.bias))
        if runtime.expert_parallel:
            self.held = share(self.total, rank, self.num_ranks, "num_experts", self.ranks)
        else:
            self.mine = share(self.size, rank, self.num_ranks, "moe_intermediate_size", self.ranks)
        count, size = len(self.held), len(self.mine)
        assert config.fused or not config.bias, "biases are known of checkpoints with fused experts alone"
        self.gate_up_proj_bias = empty_parameter(runtime, count, 2 * size) if config.bias else None
        self.down_proj_bias = empty_parameter(runtime, count, hidden_size) if config.bias else None
        #: An expert that several ranks share has its last bias added by one of them.
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
        """``x [T, hidden]``, weights and experts ``[T, k]`` to this rank's part of the sum, ``[T, hidden]``."""
        return cast(torch.Tensor, self.method.kernel(x, weights, experts, self.method.weights(self)))

    def add(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """``residual [T, hidden]`` and this rank's part of the sum, in ``residual``; None: nothing does both."""
        if self.adding is None or torch.compiler.is_compiling():
            return None
        return self.adding.add(x, weights, experts, self.method.weights(self), residual)

    @property
    def max_normed(self) -> int:
        """Tokens up to which :meth:`add_normed` may be called."""
        return 0 if self.adding is None else self.adding.max_normed

    def add_normed(
        self, stream: torch.Tensor, norm: torch.Tensor, eps: float, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """``stream [T, hidden]`` and this rank's part of the sum that its norm leads to, in ``stream``."""
        assert self.adding is not None
        return self.adding.add_behind_norm(stream, norm, eps, weights, experts, self.method.weights(self))

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """That of gate and up, and that of down where this rank adds it."""
        return self.gate_up_proj_bias, self.down_proj_bias if self.adds_bias else None

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The weights, and the biases."""
        yield from one_a_tensor(self.method.placements(self))
        if self.gate_up_proj_bias is not None and self.down_proj_bias is not None:
            wide, narrow, held = (self.total, 2 * self.size), (self.total, self.hidden_size), self.held
            yield "", "gate_up_proj_bias", PairsPlacement(self.gate_up_proj_bias, wide, share=(held, self.mine))
            yield "", "down_proj_bias", Placement(self.down_proj_bias, narrow, 0, held.start, 0, len(held))

    def elsewhere(self) -> Iterator[str]:
        """Other ranks' experts."""
        return (f"{self.folder}.{expert}" for expert in range(self.total) if expert not in self.held)

    def finalize_weights(self) -> None:
        """See :class:`ParameterLayer`."""
        self.method.finalize(self)

    def restore_weights(self, whole: bool) -> None:
        """See :class:`ParameterLayer`."""
        self.method.restore(self, whole)

    @property
    def folder(self) -> str:
        """Where checkpoints have the experts, from this module on."""
        return f"../../{self.names.module}.experts"

    @property
    def shared_module(self) -> str:
        """The same of the shared experts' network."""
        return f"../../{self.names.module}.shared_experts"
