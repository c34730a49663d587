"""Sizes that SGLang pads on a CPU so that they divide over ranks, and which of them our models pad too.

SGLang's own models use the padded sizes of ``configs/update_config.py`` and fill their weights up with zeros. Ours pad
a size only if it does not divide over ranks. The number of heads must be the one for which SGLang sizes its pool.
Hybrid models are not padded.
"""

from __future__ import annotations

from typing import Any

from atom_core.config import ModelConfig
from atom_core.quant import QuantConfig
from atom_core.quant.fp8 import BLOCK_SIZE, Fp8Config
from atom_core.quant.mxfp4 import GROUP, Mxfp4LinearConfig
from atom_core.runtime import Runtime

#: SGLang's config keys of a size and of the checkpoint's own size, if SGLang has padded it.
BEFORE_PADDING = {
    "intermediate_size": "original_intermediate_size",
    "moe_intermediate_size": "original_moe_intermediate_size",
    "intermediate_size_mlp": "original_intermediate_size_mlp",
    "shared_expert_intermediate_size": "original_shared_expert_intermediate_size",
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
}


def to_be_padded(config: ModelConfig, view: Any, attention_ranks: int, quant: QuantConfig) -> ModelConfig:
    """``config``, the checkpoint's, as SGLang will pad it for the server arguments ``view``.

    ``attention_ranks`` of the ``view.tp_size`` ranks share a layer that is not a mixture.
    """
    if view.device != "cpu" or config.has_states:
        return config
    (heads, kv_heads), ranks = config.heads, view.tp_size
    if kv_heads % ranks or heads % ranks:
        kv_heads = _multiple(kv_heads, ranks)
    return _padded(config, kv_heads, attention_ranks, quant)


def padded(config: ModelConfig, hf_config: Any, runtime: Runtime) -> ModelConfig:
    """``config``, the checkpoint's, with as many heads as SGLang's config of the model has."""
    before, now = BEFORE_PADDING["num_attention_heads"], "num_attention_heads"
    text = hf_config.get_text_config()
    if not hasattr(text, before) or config.has_states:  # not on a CPU
        return config
    more = getattr(text, now) != getattr(text, before)
    kv_heads = text.num_key_value_heads if more else config.heads[1]
    return _padded(config, kv_heads, runtime.tensor_parallel.world_size, runtime.quant)


def _padded(config: ModelConfig, kv_heads: int, ranks: int, quant: QuantConfig) -> ModelConfig:
    before, kv_before = config.heads
    heads, size = kv_heads * before // kv_before, config.intermediate_size
    unit = 1
    if isinstance(quant, Fp8Config) and quant.block:
        unit = BLOCK_SIZE
    elif isinstance(quant, Mxfp4LinearConfig):
        unit = GROUP
    if config.has_dense_layers and ranks > 1:
        size = _multiple(size, ranks * unit)
    return config.padded(heads, kv_heads, size)


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit
