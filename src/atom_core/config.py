"""Frozen model configurations, read once from a Hugging Face ``config.json``.

Every oddity of that format (missing keys and their defaults, ``rope_scaling`` against ``rope_parameters``, window
patterns) is met here; the rest of the core reads plain attributes and never a Hugging Face object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atom_core.hf_config import HfConfig
from atom_core.rope import RopeConfig, read_rope
from atom_core.types import Activation, RoutingConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class ExpertNames:
    """What checkpoints call a mixture of experts within its layer, and an expert's three matrices."""

    module: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of a feed-forward network."""

    routing: RoutingConfig
    intermediate_size: int
    """Of each expert."""
    names: ExpertNames = ExpertNames()
    shared_size: int = 0
    """Of the middle of the expert that all tokens go through beside their own; 0: there is none."""
    float32_router: bool = False
    """Whether the router's weight is in float32 whatever the model's dtype, so that near scores do not tie."""
    float32_scores: bool = False
    """Whether its product is in float32 with a weight in the model's dtype."""
    bias: bool = False
    """Of the router and of the experts."""
    fused: bool = False
    """Whether checkpoints have all experts of a layer in one tensor a matrix, transposed, gates and ups in turn."""


@dataclass(frozen=True)
class MlaConfig:
    """Attention over a latent that all heads share: a token's keys and values, compressed (MLA, arXiv 2405.04434)."""

    query_rank: int | None
    """Numbers that a token's queries are compressed to; None: they are not."""
    rank: int
    """Numbers of the latent that keys and values are made of."""
    nope_dim: int
    """Numbers of a head's query and key that are not rotated."""
    rope_dim: int
    """Numbers that are; those of the key are one for all heads."""
    value_dim: int
    scale: float
    """Of the scores."""

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Numbers that are cached of a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class Padding:
    """What of a model's sizes checkpoints do not have: zeros behind what they have, so that sizes divide over ranks."""

    heads: int = 0
    kv_heads: int = 0
    intermediate_size: int = 0


NO_PADDING = Padding()


@dataclass(frozen=True)
class LayerConfig:
    """What one decoder layer has that another may not."""

    window: int | None
    """Sliding window in tokens, the query's own included; None attends to everything before."""
    moe: MoEConfig | None = None
    """None: a dense feed-forward network."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model, whole: all ranks see the same one, sharding is the layers' business."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig
    rms_norm_eps: float
    activation: Activation
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    """Whether each head of attention has a sink: a logit that takes its share of the softmax and has no value."""
    latent: MlaConfig | None = None
    """None: heads have keys and values of their own in the cache. Else ``head_dim`` is that of queries."""
    draft_layers: int = 0
    """Layers behind the last that checkpoints have to draft further tokens with; they are not part of this model."""
    layers_before: int = 0
    """Of a draft made of such layers: how many layers the checkpoint has before them."""
    padding: Padding = NO_PADDING
    """Of ``num_heads``, ``num_kv_heads`` and ``intermediate_size``, which count it."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def cached_numbers(self) -> int:
        """Numbers that a layer's cache holds of a token, over all heads."""
        return 2 * self.num_kv_heads * self.head_dim if self.latent is None else self.latent.row

    @property
    def has_mixtures(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(layer.moe is not None for layer in self.layers)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a feed-forward network that all tokens go through."""
        return any(layer.moe is None for layer in self.layers)

    def padded(self, num_heads: int, num_kv_heads: int, intermediate_size: int) -> ModelConfig:
        """The same model with more heads and a wider middle, of zeros; each key/value head has as many queries.

        Padding changes no answer: heads of zeros attend to zeros, and what comes of them is multiplied by zeros.
        """
        assert num_heads * self.num_kv_heads == num_kv_heads * self.num_heads
        padding = Padding(
            num_heads - self.num_heads, num_kv_heads - self.num_kv_heads, intermediate_size - self.intermediate_size
        )
        assert min(padding.heads, padding.kv_heads, padding.intermediate_size) >= 0
        assert self.padding == NO_PADDING
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            padding=padding,
        )


def read_architecture(values: Mapping[str, Any]) -> str:
    """The one architecture that a parsed ``config.json`` names.

    Raises:
        ValueError: ``architectures`` is missing, empty, or no list of names.
    """
    names = values.get("architectures") or ()
    if not names:
        raise ValueError("The model's config names no architecture: config.json needs an 'architectures' entry.")
    if not isinstance(names, (list, tuple)) or not isinstance(names[0], str):
        raise ValueError(f"The model's config has architectures={names!r}; a list of names is needed.")
    return names[0]


def check_experts(num_experts: int, top_k: int, key: str) -> None:
    """A token can go to as many experts as there are.

    Raises:
        ValueError: ``num_experts_per_tok`` is more than the experts that ``key`` counts.
    """
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok={top_k} is more than there are experts ({key}={num_experts}).")


def check_groups(groups: int, let_in: int, num_experts: int, top_k: int) -> None:
    """Experts in ``groups`` (``n_group``), of which a token may choose from ``let_in`` (``topk_group``).

    Raises:
        ValueError: groups of different sizes, or fewer experts to choose from than a token has.
    """
    if num_experts % groups:
        raise ValueError(f"n_group={groups} does not divide the number of experts, n_routed_experts={num_experts}.")
    if let_in > groups:
        raise ValueError(f"topk_group={let_in} is more than there are groups of experts (n_group={groups}).")
    if top_k > let_in * (num_experts // groups):
        raise ValueError(
            f"num_experts_per_tok={top_k} is more than there are experts in topk_group={let_in} of n_group={groups} "
            f"groups of n_routed_experts={num_experts}: {let_in * (num_experts // groups)}."
        )


def read_decoder(
    hf: HfConfig,
    *,
    qkv_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sinks: bool = False,
    activation: Activation | None = None,
    windows: Sequence[int | None] | None = None,
    mixtures: Sequence[MoEConfig | None] | None = None,
    draft_layers: int = 0,
    rope_dim: int | None = None,
) -> ModelConfig:
    """Read what all dense decoder families write alike; the arguments are what they do not.

    Args:
        hf: the configuration.
        qkv_bias, attention_out_bias, mlp_bias, qk_norm, sinks: the family's facts.
        activation: the family's, where configurations do not name it.
        windows: one sliding window a layer; None for none at all.
        mixtures: one mixture of experts a layer; None for none at all.
        draft_layers: see :class:`ModelConfig`.
        rope_dim: numbers of a head that the rope is for, where that is not the head.

    Raises:
        ValueError: missing or impossible values.
    """
    num_layers, num_heads = hf.num_hidden_layers, hf.num_attention_heads
    num_kv_heads = hf.num_key_value_heads or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}: "
            "each key/value head must serve the same number of query heads."
        )
    if hf.head_dim is None and hf.hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hf.hidden_size} does not divide by num_attention_heads={num_heads}, "
            "and the config gives no head_dim."
        )
    head_dim = rope_dim or hf.head_dim or hf.hidden_size // num_heads
    return ModelConfig(
        architecture=hf.architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(window, moe)
            for window, moe in zip(windows or [None] * num_layers, mixtures or [None] * num_layers, strict=True)
        ),
        rope=read_rope(hf, head_dim=head_dim),
        rms_norm_eps=float(hf.rms_norm_eps),
        activation=activation or read_activation(hf),
        max_position=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=qkv_bias,
        attention_out_bias=attention_out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        draft_layers=draft_layers,
    )


def read_activation(hf: HfConfig) -> Activation:
    """The gated MLP's activation.

    Raises:
        ValueError: ``hidden_act`` names one that no kernel computes.
    """
    if hf.hidden_act not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act={hf.hidden_act!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[hf.hidden_act]


def typed_windows(types: Sequence[str], window: int | None, num_layers: int) -> list[int | None]:
    """One window a layer, as ``layer_types`` says.

    Raises:
        ValueError: a layer type that is neither full nor sliding attention, or a count that is not the layers'.
    """
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers={num_layers}.")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has {unknown}; supported: 'full_attention', 'sliding_attention'.")
    return [window if kind == "sliding_attention" else None for kind in types]


def every_window_or_none(types: Sequence[str] | None, window: int | None, num_layers: int) -> list[int | None]:
    """The same window in every layer, of a family that has no other; ``layer_types`` may only say the same.

    Raises:
        ValueError: ``layer_types`` differ, or say otherwise than the window.
    """
    windows = [window] * num_layers
    if types is not None and typed_windows(types, window, num_layers) != windows:
        raise ValueError(
            f"layer_types={sorted(set(types))} is not supported with sliding_window={window} of a model whose layers "
            "are all alike; supported: all 'sliding_attention' with a window, all 'full_attention' without, or no "
            "layer_types."
        )
    return windows
