"""Qwen2 and Qwen2.5: biases on q, k and v alone; an optional window from some layer on."""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import ModelConfig, read_attention, read_decoder, typed_windows, windowed
from atom_core.hf_config import HfConfig, Index, Tokens
from atom_core.models.decoder import DecoderForCausalLM


class QwenKeys(HfConfig):
    """What Qwen2 and Qwen3 share: a window in layers that ``layer_types`` names, else from ``max_window_layers`` on."""

    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: Tokens | None = 4096
    max_window_layers: Index = 28
    layer_types: list[str] | None = None

    def windows(self) -> list[int | None]:
        """One window a layer; none without ``use_sliding_window``.

        Raises:
            ValueError: a layer type that is neither full nor sliding attention, or a count that is not the layers'.
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
