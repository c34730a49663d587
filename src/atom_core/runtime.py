"""What a model is built with, instead of process-wide globals.

An adapter builds one :class:`Runtime` for each model (a target and its draft have one each) and passes it to the
constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from atom_core.kernels.select import KernelSet
from atom_core.quant import QuantConfig, Unquantized
from atom_core.types import SameStepReads

if TYPE_CHECKING:
    from atom_core.kernels.all_reduce_norm.peer_memory import PeerMemory
    from atom_core.mixers.base import BaseAttention, TokenMixer


class Communicator(Protocol):
    """One parallel group, as this rank sees it. The adapter implements it over the framework's own groups."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of ``x`` over the group; ``x`` may be reused for it."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The group's tensors, joined along ``dim`` in rank order."""

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's equal share, along ``dim``, of the sum of ``x`` over the group."""

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Exchange rows: ``send[r]`` rows of ``x`` go to rank ``r``, ``receive[r]`` come from it."""

    def why_no_peer_memory(self) -> str | None:
        """None where kernels can read the other ranks' memory, else the reason, the same on all ranks.

        A collective call.
        """

    @property
    def peer_memory(self) -> PeerMemory:
        """The group's peer memory; see :meth:`why_no_peer_memory`."""


class WithoutPeers:
    """A group whose ranks cannot read each other's memory."""

    def why_no_peer_memory(self) -> str | None:
        """See :class:`Communicator`."""
        return "The ranks share no memory."

    @property
    def peer_memory(self) -> PeerMemory:
        """See :class:`Communicator`."""
        raise AssertionError("there is none")


@dataclass(frozen=True)
class SingleRank(WithoutPeers):
    """The group of one: every exchange is the identity."""

    rank: int = 0
    world_size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """``x`` itself."""
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """``x`` itself."""
        return x

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """``x`` itself."""
        return x


class DataParallelGroup(Protocol):
    """The data-parallel ranks of one model: each serves its own requests, and the experts are split over all."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks."""

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each tensor, the rows of all ranks in rank order; ranks may have different numbers of rows."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over ranks of ``x``, which has all ranks' rows; ``x`` may be reused for it."""


@dataclass(frozen=True)
class SingleDataParallelRank:
    """The group of a model without data parallelism."""

    rank: int = 0
    world_size: int = 1

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``rows`` themselves."""
        return rows

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself."""
        return x


@dataclass(frozen=True)
class PipelineStage:
    """The decoder layers of this rank: ``first_layer .. end_layer - 1``. None: to the model's end."""

    first_layer: int = 0
    end_layer: int | None = None

    def layers(self, num_layers: int) -> range:
        """The indices of this stage's layers."""
        return range(self.first_layer, num_layers if self.end_layer is None else self.end_layer)

    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.first_layer == 0

    def is_last(self, num_layers: int) -> bool:
        """Whether this stage has the final norm and the head."""
        return self.end_layer is None or self.end_layer == num_layers


Binder = Callable[["TokenMixer", "Runtime"], "BaseAttention"]
"""Binds a layer's token mixer to the framework's cache."""

RoutedExperts = Callable[[int, torch.Tensor], None]
"""Called by each mixture with the layer's index and its router's choice, int32 ``experts [T, k]``.

The ids are global, unordered and without shared experts; ``T`` counts the rows of all data-parallel ranks, in the order
of :meth:`DataParallelGroup.gather`. Captured graphs call it too, so it must work on the device.
"""


@dataclass(frozen=True)
class Runtime:
    """Where and how one model runs."""

    device: torch.device
    dtype: torch.dtype
    kernels: KernelSet
    bind: Binder
    max_model_len: int
    """The longest sequence in tokens: rows of the rope table."""
    cache_dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    """Of the states of linear attention."""
    conv_state_dtype: torch.dtype | None = None
    """Of the last inputs that its convolutions keep; None: the model's."""
    tensor_parallel: Communicator = field(default_factory=SingleRank)
    data_parallel: DataParallelGroup = field(default_factory=SingleDataParallelRank)
    expert_parallel: bool = False
    """Whether tensor- and data-parallel ranks split the experts, not the intermediate size of each expert."""
    pipeline: PipelineStage = field(default_factory=PipelineStage)
    quant: QuantConfig = field(default_factory=Unquantized)
    same_step_reads: SameStepReads = "at page starts"
    fuse_modules: bool = True
    """Whether one kernel may replace several modules. Else each module runs by its own call, for hooks."""
    head_dtype: torch.dtype | None = None
    """The dtype of logits: float32, or None for the model's. The head's weight always has the model's."""
    routed_experts: RoutedExperts | None = None
    """None: the router's choice is not reported."""
