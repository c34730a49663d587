"""``--enable-return-routed-experts``: reports the experts of each token to vLLM.

vLLM looks among a model's modules for its own mixtures, and for modules with a ``layer_id`` and a ``capture_fn`` (its
protocol ``RoutedExpertsCaptureSource``). It sets ``capture_fn`` to a function that writes the chosen experts to a
buffer on the device, within captured graphs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom_core.config import ModelConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RoutingSource(nn.Module):
    """One mixture in vLLM's protocol ``RoutedExpertsCaptureSource``."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        #: Set by vLLM.
        self.capture_fn: Callable[[torch.Tensor], None] | None = None


class RoutingSources(nn.Module):
    """All mixtures of a model. Called with a layer's index and the experts that its router chose."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers = enumerate(config.layers)
        self._by_index = {index: RoutingSource(index) for index, layer in layers if layer.moe is not None}
        self.sources = nn.ModuleList(self._by_index.values())

    def forward(self, index: int, experts: torch.Tensor) -> None:
        """See :data:`atom_core.runtime.RoutedExperts`."""
        capture = self._by_index[index].capture_fn
        if capture is not None:  # vLLM has no buffer yet while it profiles memory
            capture(experts)


def returns_routed_experts(vllm_config: VllmConfig) -> bool:
    """Whether ``--enable-return-routed-experts`` is given."""
    outputs = getattr(vllm_config, "aux_output_config", None)  # since 0.31
    return bool((vllm_config.model_config if outputs is None else outputs).enable_return_routed_experts)


def routing_sources(vllm_config: VllmConfig, config: ModelConfig) -> RoutingSources | None:
    """The sources for the model of ``vllm_config``; None if the flag is not given."""
    return RoutingSources(config) if returns_routed_experts(vllm_config) else None
