"""Qwen2 (arXiv 2407.10671) and Qwen2.5: grouped-query attention and a SwiGLU feed-forward.

Only q, k and v have biases. Layers from some index on may have a sliding window.
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import ModelConfig, read_attention, read_decoder, typed_windows, windowed
from atom_core.hf_config import HfConfig, Index, Tokens
from atom_core.models.decoder import DecoderForCausalLM


class QwenKeys(HfConfig):
    """What Qwen2 and Qwen3 share: ``layer_types`` names windowed layers, else they start at ``max_window_layers``."""

    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: Tokens | None = 4096
    max_window_layers: Index = 28
    layer_types: list[str] | None = None

    def windows(self) -> list[int | None]:
        """One window a layer; none without ``use_sliding_window``.

        Raises:
            ValueError: an unknown layer type, or a count other than the layers'.
        """
        window = self.sliding_window if self.use_sliding_window else None
        if self.layer_types is not None:
            return typed_windows(self.layer_types, window, self.num_hidden_layers)
        return [window if index >= self.max_window_layers else None for index in range(self.num_hidden_layers)]


class Qwen2Keys(QwenKeys):
    """See the module's text."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = Qwen2Keys

    @classmethod
    def read_config(cls, hf: Qwen2Keys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        return read_decoder(hf, windowed(read_attention(hf, qkv_bias=True), hf.windows()))
