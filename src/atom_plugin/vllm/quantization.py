"""The quantisation of a model from vLLM's configuration: the checkpoint's, or the one that a flag asks for.

Our layers read this object; vLLM's own quantisation object is for its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom_core.quant import ONLINE_METHODS, QuantConfig, read_quantization
from atom_plugin.vllm.flags import OTHERWISE, refused

if TYPE_CHECKING:
    from vllm.config import ModelConfig


#: vLLM's name for the MXFP4 of GPT-OSS, which vLLM also writes into the checkpoint's config.
_OTHER_NAMES = {"gpt_oss_mxfp4": "mxfp4"}


def quantization_of(model_config: ModelConfig) -> QuantConfig:
    """See the module's docstring.

    Raises:
        ValueError: our models do not support the quantisation; the message says what they support.
    """
    from vllm.config.quantization import resolve_quantization_config

    asked = model_config.quantization
    if model_config.quantization_config != resolve_quantization_config(asked, None):
        raise ValueError(refused("ModelConfig.quantization_config").message(True, OTHERWISE))
    values, config = model_config.hf_text_config.to_dict(), model_config.model_arch_config.quantization_config
    if config is None and asked is not None and asked not in ONLINE_METHODS:
        row = refused("ModelConfig.quantization", allowed=ONLINE_METHODS)
        raise ValueError(row.message(asked, f"The checkpoint is not quantised itself. {OTHERWISE}"))
    if config is not None and (method := config.get("quant_method")) in _OTHER_NAMES:
        config = {**config, "quant_method": _OTHER_NAMES[method]}
    return read_quantization({**values, "quantization_config": config}, _OTHER_NAMES.get(asked, asked))
