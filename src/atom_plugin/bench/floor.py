"""The minimum time of a step: the bytes that it must move, divided by the memory bandwidth.

A step reads all weights and all cached keys and values once. Activations stay in the GPU's cache and do not count.
Of an MoE layer's experts, the expected number that random tokens choose is read. A step with chunks of prompts has many
tokens, and products may bound it: their operations count as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

import torch

from atom_core.config import AttentionConfig, GatedDeltaNetConfig, MlaConfig, ModelConfig
from atom_core.layers.latent_expansion import LatentExpansion
from atom_core.loading import UNQUANTIZED, build_on_meta_device
from atom_core.models.decoder import CheckpointModel
from atom_core.quant import QuantConfig


class Request(NamedTuple):
    """Of a step."""

    cached: int
    """Tokens from before the step."""
    new: int = 1
    """Tokens of the step: one decodes, more are a chunk of a prompt."""

    @property
    def length(self) -> int:
        """Tokens after the step."""
        return self.cached + self.new


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step reads."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """Weights and cache."""
        return self.weights + self.cache

    def seconds(self, bandwidth: float) -> float:
        """The minimum time at `bandwidth` bytes per second."""
        return self.total / bandwidth


def step_traffic(
    config: ModelConfig,
    batch: int,
    context: int | Sequence[int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    quant: QuantConfig = UNQUANTIZED,
) -> Traffic:
    """The traffic of a step in which `batch` requests with `context` cached tokens add one each.

    Args:
        config: the model.
        batch, context: the step; see :func:`lengths_of`.
        dtype, cache_dtype: of weights and activations, of the cache.
        quant: of the linear layers.
    """
    model = build_on_meta_device(config, dtype, quant=quant)
    return Traffic(weight_bytes(model, batch), cache_bytes(config, decodes(batch, context), cache_dtype))


def weight_bytes(model: CheckpointModel, num_tokens: int) -> int:
    """Bytes of the weights that a step of `num_tokens` reads; of an untied embedding only the tokens' rows."""
    table = model.get_parameter("model.embed_tokens.weight")
    whole = model.config.tie_word_embeddings
    table_bytes = table.nbytes if whole else num_tokens * table.shape[1] * table.itemsize
    total = table_bytes + sum(parameter.nbytes for parameter in model.parameters() if parameter is not table)
    # Weights that are dequantised on loading are read in the model's dtype.
    dequantized = (it for it in model.modules() if isinstance(it, LatentExpansion) and it.scheme is not None)
    total -= sum(it.stored.nbytes + it.weight_scale.nbytes for it in dequantized)
    unused = 0.0
    for index, layer in enumerate(model.config.layers):
        if layer.moe is not None:
            routing = layer.moe.routing
            module = model.get_submodule(f"model.layers.{index}.{layer.moe.names.module}.experts")
            experts = sum(parameter.nbytes for parameter in module.parameters())
            unused += experts * (1 - routing.top_k / routing.num_experts) ** num_tokens
    return total - round(unused)


#: Of an element of a state, which is float32.
STATE_BYTES = 4


def lengths_of(batch: int, context: int | Sequence[int]) -> tuple[int, ...]:
    """Cached tokens of each of ``batch`` requests: as many each, or those of ``context`` in turns."""
    return tuple(islice(cycle((context,) if isinstance(context, int) else context), batch))


def decodes(batch: int, context: int | Sequence[int]) -> tuple[Request, ...]:
    """Requests that decode; see :func:`lengths_of`."""
    return tuple(map(Request, lengths_of(batch, context)))


def cache_bytes(config: ModelConfig, requests: Sequence[Request], cache_dtype: torch.dtype) -> int:
    """Bytes of the keys and values that the step reads, including the new tokens', and of states, read and written."""
    mixers = [layer.mixer for layer in config.layers]
    elements = sum(
        min(request.length, (it.window or request.length) + request.new - 1) * it.cached_elements
        for request in requests
        for it in mixers
        if not isinstance(it, GatedDeltaNetConfig)
    )
    states = sum(it.state_elements for it in mixers if isinstance(it, GatedDeltaNetConfig))
    return elements * cache_dtype.itemsize + 2 * len(requests) * states * STATE_BYTES


def operations(config: ModelConfig, requests: Sequence[Request]) -> int:
    """Operations of a step's products: of linear layers, a token's experts, attention, and the head of last tokens.

    A latent is expanded for each query that meets it. What a state's recurrence takes does not count.
    """
    model = build_on_meta_device(config, torch.bfloat16)
    tokens = sum(request.new for request in requests)
    tables = {id(model.get_parameter("model.embed_tokens.weight"))}
    if not config.tie_word_embeddings:
        tables.add(id(model.get_parameter("lm_head.weight")))
    each = float(sum(it.numel() for it in model.parameters() if it.dim() > 1 and id(it) not in tables))
    for index, layer in enumerate(config.layers):
        if layer.moe is not None:
            routing = layer.moe.routing
            module = model.get_submodule(f"model.layers.{index}.{layer.moe.names.module}.experts")
            experts = sum(it.numel() for it in module.parameters() if it.dim() > 2)
            each -= experts * (1 - routing.top_k / routing.num_experts)
    head = len(requests) * config.vocab_size * config.hidden_size
    attended = sum(_attended(layer.mixer, request) for layer in config.layers for request in requests)
    return 2 * (round(tokens * each) + head + attended)


def _attended(mixer: object, request: Request) -> int:
    """Multiplications of a request's queries and keys, and of weights and values, in a layer."""
    if isinstance(mixer, AttentionConfig):
        sizes = mixer.num_heads * 2 * mixer.head_dim
    elif isinstance(mixer, MlaConfig):
        sizes = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim)
    else:
        return 0
    longest = mixer.window or request.length
    whole = max(0, min(request.new, longest - request.cached))  # queries that see all tokens before them
    pairs = whole * request.cached + whole * (whole + 1) // 2 + (request.new - whole) * longest
    return sizes * pairs
