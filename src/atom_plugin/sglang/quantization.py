"""The quantisation of a model as SGLang's configuration has it: the checkpoint's, or the one that a flag asks for.

SGLang makes an object of its own for it too, which its layers read; ours read this one.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from atom_core.quant import CHECKPOINT_METHODS, ONLINE_METHODS, QuantConfig, read_quantization

#: Names that SGLang has for what a checkpoint calls otherwise; it writes them into the checkpoint's config too.
_OTHER_NAMES = {"modelopt_fp8": "modelopt", "compressed_tensors": "compressed-tensors"}


def quantization_of(hf_config: Any, asked: str | None) -> QuantConfig:
    """See the module's text; ``asked`` is SGLang's name of the quantisation.

    Raises:
        ValueError: our models cannot run it; the message says what they can.
    """
    values = hf_config.to_dict()
    if config := values.get("quantization_config"):
        method = config.get("quant_method")
        values["quantization_config"] = {**config, "quant_method": _OTHER_NAMES.get(method, method)}
    elif _OTHER_NAMES.get(str(asked), asked) in set(CHECKPOINT_METHODS) - set(ONLINE_METHODS):
        raise ValueError(
            f"--quantization {asked} is how some checkpoints are stored, and this one is not: its config.json has no "
            "quantization_config. Leave it out; supported while weights are loaded: --quantization fp8."
        )
    quant = read_quantization(values, None if asked in (None, "unquant") else _OTHER_NAMES.get(asked, asked))
    if quant.name != "none" and (ignored := envs.SGLANG_FP8_IGNORED_LAYERS.get()):
        raise ValueError(
            f"atom-plugin does not support SGLANG_FP8_IGNORED_LAYERS={ignored}: which modules are not quantised is "
            "what the checkpoint says. Unset it, or unset SGLANG_EXTERNAL_MODEL_PACKAGE to use it."
        )
    return quant
