"""The contract between a token mixer and the owner of its cache.

A :class:`TokenMixer` runs between a layer's projections: it writes the new tokens to the cache and mixes them with the
cached ones. :class:`BaseAttention` binds one to a framework's cache: a model calls it without knowing caches. The
adapters' children of :class:`PagedAttention` (vLLM) and :class:`RadixAttention` (SGLang) differ only in where the batch
and the cache come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

from atom_core.batch import Batch, BatchShape
from atom_core.cache import Cache, CacheSpec

if TYPE_CHECKING:
    from atom_core.kernels.select import KernelSet
    from atom_core.runtime import Runtime
    from atom_core.types import GraphSupport


class TokenMixer(ABC):
    """One layer's mixer, as this rank has it. ``H`` heads with queries of ``D`` and values of ``V`` elements.

    Args:
        name: the layer's full name, unique in the process: "model.layers.0.self_attn.attn".
        layer_index: the decoder layer's index in the model.
        heads: ``H, V``: a token's output has ``H * V`` elements.
        query_dim: ``D``.
        scale: factor of the scores.
    """

    window: int | None = None
    """Sliding window in tokens, the query's own included."""
    soft_cap: float | None = None
    """Bound of the scores: ``soft_cap * tanh(score / soft_cap)``."""
    plans_by_host_lengths: ClassVar[bool] = False
    """Whether :meth:`plan` reads :attr:`Batch.host`. Requests that verify drafts then count as decodes."""

    def __init__(self, name: str, layer_index: int, heads: tuple[int, int], query_dim: int, scale: float) -> None:
        self.name, self.layer_index, self.heads = name, layer_index, heads
        self.query_dim, self.scale = query_dim, scale
        self.k_scale = self.v_scale = 1.0

    @property
    @abstractmethod
    def cache_spec(self) -> CacheSpec:
        """The cache that the mixer needs."""

    @property
    @abstractmethod
    def graph_support(self) -> GraphSupport:
        """Which batches a captured graph may replay."""

    @abstractmethod
    def select_kernels(self, kernels: KernelSet) -> None:
        """Choose the kernels of :meth:`run`, once. A mixer that a framework's own attention runs needs none."""

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Sequence[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`, for what :meth:`run` runs."""
        return ()

    def plan_key(self) -> Hashable | None:
        """Layers with the same key share a plan. None: there is nothing to plan."""
        return None

    def plan(self, batch: Batch) -> object:
        """The plan of a step for all layers of the key; :meth:`run` reads it from :attr:`Batch.plans`."""
        raise AssertionError("a mixer without a plan_key plans nothing")

    @abstractmethod
    def scaled(self, cache: Any) -> Any:
        """``cache`` with the layer's scales, which only an FP8 cache has."""

    @abstractmethod
    def run(
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, batch: Batch, cache: Any, out: torch.Tensor
    ) -> None:
        """Write the new tokens to the cache and mix.

        Args:
            inputs: the projections' outputs, a row a token; the mixer may write to them. Rows past ``batch.num_tokens``
                are padding.
            positions: ``[T]`` integers.
            batch: the step, with plans.
            cache: the layer's, as :attr:`cache_spec` says.
            out: ``[T, H, V]``; rows of padding are not written.
        """

    def empty_output(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Uninitialised ``[T, H, V]``."""
        return inputs[0].new_empty(inputs[0].shape[0], *self.heads)

    def profile(self, out: torch.Tensor, max_requests: int) -> None:  # noqa: B027 - most need nothing
        """Allocate and free what :meth:`run` may need besides ``out``, for the engine's memory profiling.

        ``max_requests``: the most requests that a step has.
        """


class BaseAttention(nn.Module, ABC):
    """A token mixer bound to a framework's cache."""

    def __init__(self, mixer: TokenMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def set_scales(self, key: float, value: float) -> None:
        """Set the scales of an FP8 cache, once after loading: captured graphs contain the values."""
        self.mixer.k_scale, self.mixer.v_scale = key, value

    @abstractmethod
    def forward(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: Any) -> torch.Tensor:
        """Mix new tokens.

        Args:
            inputs: see :meth:`TokenMixer.run`.
            positions: ``[T]`` integers.
            step: what the framework passes through the model; see the child class.

        Returns:
            ``[T, H * V]``.
        """


class KernelAttention(BaseAttention):
    """A token mixer that runs on our kernels, over a cache that a framework owns."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer)
        mixer.select_kernels(runtime.kernels)


class PagedAttention(KernelAttention):
    """Bound by name, as in vLLM: the layer's name finds batch and cache, and ``step`` is not read.

    The framework binds the cache to the layer once and provides each step's batch outside the model call.
    """

    #: The most requests that a step has, for memory profiling.
    max_requests: int

    @abstractmethod
    def batch(self) -> Batch | None:
        """This step's batch; None in a run without one (memory profiling)."""

    @abstractmethod
    def cache(self) -> Cache:
        """This layer's cache."""

    def attend(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, out: torch.Tensor) -> None:
        """Write to ``out [T, H, V]``: zeros in a run without a batch, which touches no cache."""
        batch = self.batch()
        if batch is None:
            self.mixer.profile(out, self.max_requests)
            out.zero_()
            return
        self.mixer.run(inputs, positions, batch, self.cache(), out)

    def forward(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :meth:`BaseAttention.forward`; ``step`` is not read."""
        out = self.mixer.empty_output(inputs)
        self.attend(inputs, positions, out)
        return out.flatten(1)


class Step(Protocol):
    """A step that provides its batch and the caches."""

    def lookup(self, mixer: TokenMixer) -> tuple[Batch, Cache]:
        """The batch, with the mixer's plan, and the layer's cache."""


class RadixAttention(KernelAttention):
    """Bound by the step, as in SGLang and in the standalone runner: ``step`` provides the batch and the caches."""

    def forward(
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: Step, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :meth:`BaseAttention.forward`; written to ``out [T, H * V]`` where it is given."""
        batch, cache = step.lookup(self.mixer)
        out = self.mixer.empty_output(inputs).flatten(1) if out is None else out
        self.mixer.run(inputs, positions, batch, cache, out.view(-1, *self.mixer.heads))
        return out
