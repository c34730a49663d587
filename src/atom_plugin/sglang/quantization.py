"""The quantisation of a model from SGLang's configuration: the checkpoint's, or the one that a flag asks for.

Our layers read this object; SGLang's own quantisation object is for its layers.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from atom_core.quant import CHECKPOINT_METHODS, ONLINE_METHODS, QuantConfig, read_quantization

#: SGLang's names of checkpoints' methods, which SGLang also writes into the checkpoint's config.
_OTHER_NAMES = {"modelopt_fp8": "modelopt", "compressed_tensors": "compressed-tensors"}


def quantization_of(hf_config: Any, asked: str | None) -> QuantConfig:
    """See the module's docstring; ``asked`` is SGLang's name of the quantisation.

    Raises:
        ValueError: our models do not support the quantisation; the message says what they support.
    """
    values = hf_config.to_dict()
    if config := values.get("quantization_config"):
        method = config.get("quant_method")
        values["quantization_config"] = {**config, "quant_method": _OTHER_NAMES.get(method, method)}
    elif _OTHER_NAMES.get(str(asked), asked) in set(CHECKPOINT_METHODS) - set(ONLINE_METHODS):
        raise ValueError(
            f"--quantization {asked} is for checkpoints that are stored so, and this one is not: its config.json has "
            "no quantization_config. Leave it out; supported while weights are loaded: --quantization fp8."
        )
    quant = read_quantization(values, None if asked in (None, "unquant") else _OTHER_NAMES.get(asked, asked))
    if quant.name != "none" and (ignored := envs.SGLANG_FP8_IGNORED_LAYERS.get()):
        raise ValueError(
            f"atom-plugin does not support SGLANG_FP8_IGNORED_LAYERS={ignored}: the checkpoint says which modules are "
            "not quantised. Unset it, or unset SGLANG_EXTERNAL_MODEL_PACKAGE to use it."
        )
    return quant
