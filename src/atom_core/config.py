"""Frozen model configurations, read once from a Hugging Face ``config.json``.

The readers handle that format's oddities; the rest of the core reads plain attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

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
    """The names in checkpoints of a layer's mixture of experts and of an expert's three matrices."""

    module: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    """The module of the shared experts' network."""
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of a feed-forward network."""

    routing: RoutingConfig
    intermediate_size: int
    """Of each expert."""
    names: ExpertNames = ExpertNames()
    shared_size: int = 0
    """Intermediate size of the shared expert; 0: no shared expert."""
    shared_size_key: str = "n_shared_experts * moe_intermediate_size"
    """The keys of ``config.json`` that give ``shared_size``."""
    shared_gate: bool = False
    """Whether each token's output of the shared expert is multiplied by a sigmoid, whose logit is a linear gate's."""
    float32_router: bool = False
    """Whether the router's weight is float32 in any model dtype, so that near scores do not tie."""
    float32_scores: bool = False
    """Whether the router's product is float32 with a weight in the model's dtype."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    fused: bool = False
    """Whether checkpoints stack a layer's experts in one transposed tensor, with gates and ups interleaved."""


@dataclass(frozen=True)
class Padding:
    """Heads of zeros after the checkpoint's, so that heads divide by ranks."""

    heads: int = 0
    kv_heads: int = 0


NO_PADDING = Padding()


@dataclass(frozen=True)
class AttentionConfig:
    """Attention over cached keys and values (MHA, GQA, MQA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window in tokens, the query's own included. None: a query attends to every token before it."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and of k has an RMS norm before rope."""
    sinks: bool = False
    """Whether each head has a sink: a logit in the softmax without a value."""
    output_gate: bool = False
    """Whether a head's output is multiplied by the sigmoid of a gate, which ``q_proj`` has after the head's query."""
    padding: Padding = NO_PADDING
    """Included in ``num_heads`` and ``num_kv_heads``."""

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.head_dim

    @property
    def cached_elements(self) -> int:
        """Cached elements of a token, over all heads."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (MLA, arXiv 2405.04434): all heads' keys and values come from one latent a token."""

    num_heads: int
    query_rank: int | None
    """Rank of the compressed query. None: queries are not compressed."""
    rank: int
    """Rank of the latent of keys and values."""
    nope_dim: int
    """Elements of a head's query and key without rope."""
    rope_dim: int
    """Elements of a head's query and key with rope. All heads share this part of the key."""
    value_dim: int
    scale: float
    """Factor of the scores."""
    padding: Padding = NO_PADDING
    """Included in ``num_heads``."""

    window: ClassVar[None] = None

    @property
    def num_kv_heads(self) -> int:
        """Each head has its own keys and values."""
        return self.num_heads

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Elements of a token's row in the cache: the latent, then the key's part with rope."""
        return self.rank + self.rope_dim

    @property
    def cached_elements(self) -> int:
        """Cached elements of a token."""
        return self.row


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet (arXiv 2412.06464): linear attention, whose state has one size whatever the sequence's length."""

    num_key_heads: int
    """Heads of queries and of keys."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens that the causal convolution of q, k and v reads, the token's own included."""
    fused_projections: bool
    """Whether checkpoints have ``in_proj_qkvz`` and ``in_proj_ba``, with rows by key head, and not a tensor each."""

    window: ClassVar[None] = None

    @property
    def values_per_key(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def state_elements(self) -> int:
        """Elements of a request's state."""
        return self.num_value_heads * self.value_dim * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


#: A layer's token mixer; each kind has a module in :mod:`atom_core.mixers`.
MixerConfig: TypeAlias = AttentionConfig | MlaConfig | GatedDeltaNetConfig


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer."""

    mixer: MixerConfig
    moe: MoEConfig | None = None
    """None: a dense feed-forward network."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model, the same on all ranks; layers shard themselves."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig
    rms_norm_eps: float
    activation: Activation
    max_position: int
    tie_word_embeddings: bool
    mlp_bias: bool = False
    draft_layers: int = 0
    """The checkpoint's draft layers after the last layer; they are not part of this model."""
    layers_before: int = 0
    """For a draft made of these layers: the number of layers before them."""
    intermediate_padding: int = 0
    """Zeros included in ``intermediate_size`` that checkpoints do not have."""
    zero_centered_norms: bool = False
    """Whether norms multiply by ``1 + weight``: those of the stream, and of each head of q and k."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def has_mla(self) -> bool:
        """Whether some layer is MLA."""
        return any(isinstance(layer.mixer, MlaConfig) for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state a request, and not its tokens (a hybrid model)."""
        return any(isinstance(layer.mixer, GatedDeltaNetConfig) for layer in self.layers)

    @property
    def has_mixtures(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(layer.moe is not None for layer in self.layers)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense feed-forward network."""
        return any(layer.moe is None for layer in self.layers)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads, the same in all layers of attention."""
        mixers = [it.mixer for it in self.layers if not isinstance(it.mixer, GatedDeltaNetConfig)]
        ((heads, kv_heads),) = {(mixer.num_heads, mixer.num_kv_heads) for mixer in mixers}
        return heads, kv_heads

    def padded(self, num_heads: int, num_kv_heads: int, intermediate_size: int) -> ModelConfig:
        """The same model with more heads and a larger intermediate size, padded by zeros that do not change results.

        The number of query heads for each key/value head stays. Heads of linear attention are not padded.
        """
        assert not self.has_states
        heads, kv_heads = self.heads
        assert num_heads * kv_heads == num_kv_heads * heads
        padding, wider = Padding(num_heads - heads, num_kv_heads - kv_heads), intermediate_size - self.intermediate_size
        assert min(padding.heads, padding.kv_heads, wider) >= 0
        assert not self.intermediate_padding
        layers = tuple(replace(layer, mixer=_padded(layer.mixer, padding)) for layer in self.layers)
        return replace(self, layers=layers, intermediate_size=intermediate_size, intermediate_padding=wider)


def _padded(mixer: MixerConfig, padding: Padding) -> MixerConfig:
    assert not isinstance(mixer, GatedDeltaNetConfig)
    assert mixer.padding == NO_PADDING
    heads = mixer.num_heads + padding.heads
    if isinstance(mixer, MlaConfig):
        return replace(mixer, num_heads=heads, padding=padding)
    return replace(mixer, num_heads=heads, num_kv_heads=mixer.num_kv_heads + padding.kv_heads, padding=padding)


def read_architecture(values: Mapping[str, Any]) -> str:
    """The one architecture that a parsed ``config.json`` names.

    Raises:
        ValueError: ``architectures`` is missing, empty, or not a list of names.
    """
    names = values.get("architectures") or ()
    if not names:
        raise ValueError("The model's config names no architecture: config.json needs an 'architectures' entry.")
    if not isinstance(names, (list, tuple)) or not isinstance(names[0], str):
        raise ValueError(f"The model's config has architectures={names!r}; a list of names is needed.")
    return names[0]


def check_experts(num_experts: int, top_k: int, key: str) -> None:
    """Check the number of experts for each token.

    Raises:
        ValueError: ``num_experts_per_tok`` is more than the experts that ``key`` counts.
    """
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok={top_k} is more than there are experts ({key}={num_experts}).")


def check_groups(groups: int, top_groups: int, num_experts: int, top_k: int) -> None:
    """Check experts in ``groups`` (``n_group``), of which a token may use ``top_groups`` (``topk_group``).

    Raises:
        ValueError: groups of different sizes, or fewer experts to choose from than a token has.
    """
    if num_experts % groups:
        raise ValueError(f"n_group={groups} does not divide the number of experts, n_routed_experts={num_experts}.")
    if top_groups > groups:
        raise ValueError(f"topk_group={top_groups} is more than there are groups of experts (n_group={groups}).")
    if top_k > top_groups * (num_experts // groups):
        raise ValueError(
            f"num_experts_per_tok={top_k} is more than there are experts in topk_group={top_groups} of "
            f"n_group={groups} groups of n_routed_experts={num_experts}: {top_groups * (num_experts // groups)}."
        )


def read_attention(
    hf: HfConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    sinks: bool = False,
    output_gate: bool = False,
) -> AttentionConfig:
    """Read a family's attention; the arguments say what configurations do not.

    Raises:
        ValueError: sizes that do not match.
    """
    num_heads, num_kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
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
    head_dim = hf.head_dim or hf.hidden_size // num_heads
    return AttentionConfig(
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        output_gate=output_gate,
    )


def windowed(attention: AttentionConfig, windows: Sequence[int | None]) -> list[AttentionConfig]:
    """``attention`` of each layer, with the layer's own sliding window or None."""
    return [replace(attention, window=window) for window in windows]


def read_decoder(
    hf: HfConfig,
    mixers: Sequence[MixerConfig],
    *,
    mixtures: Sequence[MoEConfig | None] | None = None,
    mlp_bias: bool = False,
    activation: Activation | None = None,
    draft_layers: int = 0,
    rope: RopeConfig | None = None,
    zero_centered_norms: bool = False,
) -> ModelConfig:
    """Read what decoder families share; the arguments say what differs.

    Args:
        hf: the configuration.
        mixers: one a layer.
        mixtures: one a layer, None for a dense layer. None: all layers are dense.
        mlp_bias: whether dense networks have biases.
        activation: the family's activation, where configurations do not name it.
        draft_layers: see :class:`ModelConfig`.
        rope: None: read from the configuration for the attention's heads.
        zero_centered_norms: see :class:`ModelConfig`.

    Raises:
        ValueError: missing or impossible values.
    """
    if rope is None:
        (head_dim,) = {mixer.head_dim for mixer in mixers if isinstance(mixer, AttentionConfig)}
        rope = read_rope(hf, head_dim=head_dim)
    return ModelConfig(
        architecture=hf.architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        layers=tuple(map(LayerConfig, mixers, mixtures or [None] * len(mixers))),
        rope=rope,
        rms_norm_eps=float(hf.rms_norm_eps),
        activation=activation or read_activation(hf),
        max_position=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        mlp_bias=mlp_bias,
        draft_layers=draft_layers,
        zero_centered_norms=zero_centered_norms,
    )


def read_activation(hf: HfConfig) -> Activation:
    """The gated MLP's activation.

    Raises:
        ValueError: ``hidden_act`` is not supported.
    """
    if hf.hidden_act not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act={hf.hidden_act!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[hf.hidden_act]


def typed_windows(types: Sequence[str], window: int | None, num_layers: int) -> list[int | None]:
    """One window a layer, as ``layer_types`` says.

    Raises:
        ValueError: an unknown layer type, or a count other than ``num_layers``.
    """
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers={num_layers}.")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has {unknown}; supported: 'full_attention', 'sliding_attention'.")
    return [window if kind == "sliding_attention" else None for kind in types]


def every_window_or_none(types: Sequence[str] | None, window: int | None, num_layers: int) -> list[int | None]:
    """The same window in every layer; ``layer_types`` must agree.

    Raises:
        ValueError: ``layer_types`` do not agree.
    """
    windows = [window] * num_layers
    if types is not None and typed_windows(types, window, num_layers) != windows:
        raise ValueError(
            f"layer_types={sorted(set(types))} is not supported with sliding_window={window} of a model whose layers "
            "are all alike; supported: all 'sliding_attention' with a window, all 'full_attention' without, or no "
            "layer_types."
        )
    return windows
