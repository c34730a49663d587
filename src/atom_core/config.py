"""Frozen model configurations, read once from a Hugging Face ``config.json``.

Every oddity of that format (missing keys and their defaults, ``rope_scaling`` against ``rope_parameters``, window
patterns) is met here; the rest of the core reads plain attributes and never a Hugging Face object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from atom_core.rope import RopeConfig, read_rope

#: Of gated networks; "clamped_swiglu" is GPT-OSS's, which configurations do not name.
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
#: Of the clamped SwiGLU: how steep its sigmoid is, and where it clamps.
SWIGLU_STEEPNESS, SWIGLU_LIMIT = 1.702, 7.0
Scoring = Literal["softmax", "sigmoid"]
#: What the score of a group of experts is: of its largest, or the sum of its two largest.
GroupScore = Literal["largest", "two largest"]

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_T = TypeVar("_T")


class HfConfig:
    """Typed reads of a Hugging Face configuration, with errors that name the key and its value."""

    def __init__(self, source: Mapping[str, Any] | Any) -> None:
        """Wrap a parsed ``config.json``, or any object with ``to_dict()`` such as a ``PretrainedConfig``."""
        self.values: Mapping[str, Any] = source if isinstance(source, Mapping) else source.to_dict()

    def get(self, key: str, default: _T) -> _T:
        """The value of ``key``; ``default`` where it is missing or null."""
        value = self.values.get(key)
        return default if value is None else cast(_T, value)

    def with_defaults(self, **defaults: Any) -> HfConfig:
        """The same, with what a family takes missing keys for."""
        return HfConfig({**defaults, **self.values})

    def positive(self, key: str, default: int | None = None) -> int:
        """The positive integer at ``key``.

        Raises:
            ValueError: the key is missing with no default, or is not a positive integer.
        """
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"The model's config has no {key!r}, which its architecture needs.")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"The model's config has {key}={value!r}; a positive integer is needed.")
        return value

    def window(self) -> int | None:
        """The sliding window in tokens: null means none, a missing key what Hugging Face's classes take it for.

        Raises:
            ValueError: it is not a positive integer.
        """
        if "sliding_window" in self.values and self.values["sliding_window"] is None:
            return None
        return self.positive("sliding_window", 4096)

    def activation(self) -> Activation:
        """The gated MLP's activation.

        Raises:
            ValueError: ``hidden_act`` names one that no kernel computes.
        """
        name = self.get("hidden_act", "silu")
        if name not in _ACTIVATIONS:
            raise ValueError(f"hidden_act={name!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}.")
        return _ACTIVATIONS[name]

    def architecture(self) -> str:
        """The one architecture that this config names.

        Raises:
            ValueError: ``architectures`` is missing or empty.
        """
        names = self.get("architectures", cast("Sequence[str]", ()))
        if not names:
            raise ValueError("The model's config names no architecture: config.json needs an 'architectures' entry.")
        return names[0]


@dataclass(frozen=True)
class RoutingConfig:
    """How a router of a mixture of experts chooses; see :mod:`atom_core.kernels.moe_routing`."""

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalize: bool
    correction: bool = False
    """Whether the choice, and it alone, goes by scores that are corrected."""
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "two largest"
    shared: int = 0
    """Experts behind those that are chosen from, to which every token goes as well, each with a weight of 1."""

    @property
    def total_experts(self) -> int:
        """Experts that a token may go to, shared ones included."""
        return self.num_experts + self.shared

    @property
    def experts_per_token(self) -> int:
        """Experts that each token goes to, shared ones included."""
        return self.top_k + self.shared

    def __post_init__(self) -> None:
        assert self.num_experts % self.num_groups == 0
        assert 0 < self.top_groups <= self.num_groups
        assert 0 < self.top_k <= self.top_groups * (self.num_experts // self.num_groups)


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
class LatentConfig:
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
    latent: LatentConfig | None = None
    """None: heads have keys and values of their own in the cache. Else ``head_dim`` is that of queries."""
    draft_layers: int = 0
    """Layers behind the last that checkpoints have to draft further tokens with; they are not part of this model."""
    layers_before: int = 0
    """Of a draft made of such layers: how many layers the checkpoint has before them."""

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

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | Any) -> ModelConfig:
        """Read ``source``, a parsed ``config.json`` or a ``PretrainedConfig``, through its family's reader.

        Raises:
            ValueError: an unsupported architecture, or a value that its family cannot run.
        """
        from atom_core.models.registry import load_model_class  # the registry's readers build this class

        hf = HfConfig(source)
        return load_model_class(hf.architecture()).read_config(hf)


def read_experts(hf: HfConfig, keys: Sequence[str], num_experts: int, top_k: int) -> tuple[int, int]:
    """How many experts a layer has, and a token; ``keys`` may name the first, the others are what no key means.

    Raises:
        ValueError: a token has more than there are.
    """
    named = [key for key in keys if key in hf.values]
    key = named[0] if named else keys[0]
    total, chosen = hf.positive(key, num_experts), hf.positive("num_experts_per_tok", top_k)
    if chosen > total:
        raise ValueError(f"num_experts_per_tok={chosen} is more than there are experts ({key}={total}).")
    return total, chosen


def read_groups(hf: HfConfig, num_experts: int, top_k: int) -> tuple[int, int]:
    """In how many groups the experts are (``n_group``), and of how many a token may choose (``topk_group``).

    Raises:
        ValueError: groups of different sizes, or fewer experts to choose from than a token has.
    """
    groups, let_in = hf.positive("n_group", 1), hf.positive("topk_group", 1)
    if num_experts % groups:
        raise ValueError(f"n_group={groups} does not divide the number of experts, {num_experts}.")
    if let_in > groups:
        raise ValueError(f"topk_group={let_in} is more than there are groups of experts (n_group={groups}).")
    if top_k > let_in * (num_experts // groups):
        raise ValueError(
            f"num_experts_per_tok={top_k} is more than there are experts in topk_group={let_in} of n_group={groups} "
            f"groups: {let_in * (num_experts // groups)}."
        )
    return groups, let_in


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
    default_head_dim: int | None = None,
    tie_word_embeddings: bool = False,
    draft_layers: int = 0,
) -> ModelConfig:
    """Read what all dense decoder families write alike; the arguments are what they do not.

    Args:
        hf: the configuration.
        qkv_bias, attention_out_bias, mlp_bias, qk_norm, sinks: the family's facts.
        activation: the family's, where configurations do not name it.
        windows: one sliding window a layer; None for none at all.
        mixtures: one mixture of experts a layer; None for none at all.
        default_head_dim: the head size where the config gives none; None for ``hidden_size / num_heads``.
        tie_word_embeddings: what a config without that key means.
        draft_layers: see :class:`ModelConfig`.

    Raises:
        ValueError: missing or impossible values.
    """
    num_layers = hf.positive("num_hidden_layers")
    num_heads = hf.positive("num_attention_heads")
    num_kv_heads = hf.positive("num_key_value_heads", num_heads)
    hidden_size = hf.positive("hidden_size")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}: "
            "each key/value head must serve the same number of query heads."
        )
    if hf.get("head_dim", default_head_dim) is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} does not divide by num_attention_heads={num_heads}, "
            "and the config gives no head_dim."
        )
    head_dim = hf.positive("head_dim", default_head_dim or hidden_size // num_heads)
    max_position = hf.positive("max_position_embeddings")
    return ModelConfig(
        architecture=hf.architecture(),
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(window, moe)
            for window, moe in zip(windows or [None] * num_layers, mixtures or [None] * num_layers, strict=True)
        ),
        rope=read_rope(hf.values, head_dim=head_dim, max_position=max_position),
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        activation=activation or hf.activation(),
        max_position=max_position,
        tie_word_embeddings=hf.get("tie_word_embeddings", tie_word_embeddings),
        qkv_bias=qkv_bias,
        attention_out_bias=attention_out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        draft_layers=draft_layers,
    )


def window_pattern(hf: HfConfig) -> list[int | None]:
    """One window a layer, in the way of the Qwen families.

    ``layer_types`` says it a layer where present; else the layers from ``max_window_layers`` on have the window, and
    only if ``use_sliding_window`` is set.

    Raises:
        ValueError: a layer type that is neither full nor sliding attention, or a count that is not the layers'.
    """
    num_layers = hf.positive("num_hidden_layers")
    window = hf.window() if hf.get("use_sliding_window", False) else None
    types = hf.get("layer_types", None)
    if types is None:
        first = hf.get("max_window_layers", 28)  # Hugging Face's default, whatever the number of layers
        return [window if index >= first else None for index in range(num_layers)]
    return typed_windows(types, window, num_layers)


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
