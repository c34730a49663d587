"""FP8 checkpoints of AMD Quark (``quant_method`` "quark"; https://quark.docs.amd.com).

One scheme for all linear layers: ``global_quant_config``. What ``layer_quant_config`` says of single layers may differ
in how their output is quantised, which is how keys and values of an FP8 cache are described; their scales are read as
those of other makers are (:mod:`atom_core.layers.cache_scales`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_core.quant.errors import unsupported
from atom_core.quant.fp8 import BLOCK_SIZE, Fp8Config, with_plain_head

_METHOD = "quark"


def read_quark(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config:
    """A checkpoint of ``quant_method`` "quark" with weights and activations in FP8.

    Raises:
        ValueError: other numbers, some layers quantised otherwise, or a quantised head.
    """
    common = config.get("global_quant_config") or {}
    if config.get("layer_type_quant_config"):
        raise unsupported(_METHOD, "layer_type_quant_config (only one scheme for all linear layers)")
    for name, of_layer in (config.get("layer_quant_config") or {}).items():
        for part in ("weight", "input_tensors"):
            if (of_layer or {}).get(part) != common.get(part):
                raise unsupported(_METHOD, f"a scheme of its own for {name!r} (only one for all linear layers)")
    scheme = _scheme(common.get("weight"), common.get("input_tensors"))
    ignored = tuple(config.get("exclude") or ())
    return with_plain_head(Fp8Config(serialized=True, ignored=ignored, **scheme), _METHOD, hf)


def _scheme(weight: Any, inputs: Any) -> dict[str, Any]:
    for what, tensors in (("weights", weight), ("input_tensors", inputs)):
        if not isinstance(tensors, Mapping) or tensors.get("dtype") != "fp8_e4m3":
            raise unsupported(_METHOD, f"{what} of {_described(tensors)} (only fp8_e4m3)")
        if not tensors.get("symmetric", True):
            raise unsupported(_METHOD, f"{what} that are not symmetric")
    of_weight, of_inputs, dynamic = weight.get("qscheme"), inputs.get("qscheme"), bool(inputs.get("is_dynamic"))
    if weight.get("is_dynamic") or of_weight not in ("per_tensor", "per_channel", "per_block"):
        raise unsupported(_METHOD, f"weights of {_described(weight)}")
    if of_weight == "per_block":
        grouped = dynamic and of_inputs == "per_group" and inputs.get("group_size") == BLOCK_SIZE
        plain = weight.get("scale_type") in (None, "float32")
        if list(weight.get("block_size") or ()) != [BLOCK_SIZE, BLOCK_SIZE] or not grouped or not plain:
            raise unsupported(_METHOD, f"blocks of {_described(weight)} with input_tensors of {_described(inputs)}")
        return {"input_scale": "dynamic", "block": True}
    if of_inputs not in (("per_tensor", "per_channel") if dynamic else ("per_tensor",)):
        raise unsupported(_METHOD, f"input_tensors of {_described(inputs)}")
    return {"input_scale": "dynamic" if dynamic else "static"}


def _described(tensors: Any) -> str:
    if not isinstance(tensors, Mapping):
        return "several dtypes at once" if tensors else "no dtype (weights alone quantised)"
    keys = ("dtype", "qscheme", "is_dynamic", "group_size", "block_size", "scale_type")
    return ", ".join(f"{key}={tensors[key]!r}" for key in keys if tensors.get(key) is not None)
