"""The least time that a decoding step can take: bytes that it must move, divided by the memory's bandwidth.

Weights are read once, and keys and values of all cached tokens. Activations stay in the GPU's cache and count nothing.
Of a mixture's experts those are read that some token has chosen; how many these are is what chance makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.config import ModelConfig
from atom_core.layers.latent_expansion import LatentExpansion
from atom_core.loading import UNQUANTIZED, lay_out
from atom_core.models.decoder import CheckpointModel
from atom_core.quant import QuantConfig


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step moves."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache

    def seconds(self, bandwidth: float) -> float:
        """The floor at so many bytes a second."""
        return self.total / bandwidth


def step_traffic(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    quant: QuantConfig = UNQUANTIZED,
) -> Traffic:
    """Bytes of a step in which each of `batch` requests has `context` tokens cached and brings one.

    Args:
        config: the model.
        batch, context: the step.
        dtype, cache_dtype: of weights and activations, of the cache.
        quant: of the linear layers.
    """
    model = lay_out(config, dtype, quant=quant)
    return Traffic(weight_bytes(model, batch), cache_bytes(config, batch, context, cache_dtype))


def weight_bytes(model: CheckpointModel, num_tokens: int) -> int:
    """Bytes of the weights that a step of `num_tokens` reads, each once.

    Of an embedding's table only the tokens' rows are read, unless the head is tied to it.
    """
    table = model.get_parameter("model.embed_tokens.weight")
    whole = model.config.tie_word_embeddings
    table_bytes = table.nbytes if whole else num_tokens * table.shape[1] * table.itemsize
    total = table_bytes + sum(parameter.nbytes for parameter in model.parameters() if parameter is not table)
    # What is scaled back when it is loaded is read in the model's dtype.
    scaled_back = (it for it in model.modules() if isinstance(it, LatentExpansion) and it.scheme is not None)
    total -= sum(it.stored.nbytes + it.weight_scale.nbytes for it in scaled_back)
    unused = 0.0
    for index, layer in enumerate(model.config.layers):
        if layer.moe is not None:
            routing = layer.moe.routing
            module = model.get_submodule(f"model.layers.{index}.{layer.moe.names.module}.experts")
            experts = sum(part.nbytes for part in module.parameters())
            unused += experts * (1 - routing.top_k / routing.num_experts) ** num_tokens
    return total - round(unused)


def cache_bytes(config: ModelConfig, batch: int, context: int, cache_dtype: torch.dtype) -> int:
    """Bytes of keys and values that the step reads, those that it brings included."""
    mixers = (layer.mixer for layer in config.layers)
    elements = sum(min(context + 1, it.window or context + 1) * it.cached_elements for it in mixers)
    return batch * elements * cache_dtype.itemsize
