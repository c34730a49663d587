"""FP8 and MXFP4 checkpoints of AMD Quark (``quant_method`` "quark"; https://quark.docs.amd.com).

``global_quant_config`` is the scheme of all linear layers. ``layer_quant_config`` may only change the quantisation of a
layer's output, which describes an FP8 cache; :mod:`atom_core.layers.cache_scales` reads its scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_core.quant.errors import unsupported
from atom_core.quant.fp8 import BLOCK_SIZE, Fp8Config
from atom_core.quant.mxfp4 import GROUP, Mxfp4LinearConfig
from atom_core.quant.scheme import with_plain_head

_METHOD = "quark"
_MXFP4 = f"per_group of {GROUP} with scale_format='e8m0'"


def read_quark(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config | Mxfp4LinearConfig:
    """A checkpoint of ``quant_method`` "quark".

    Raises:
        ValueError: another format, different schemes for different layers, or a quantised head.
    """
    common = config.get("global_quant_config") or {}
    if config.get("layer_type_quant_config"):
        raise unsupported(_METHOD, "layer_type_quant_config (only one scheme for all linear layers)")
    for name, layer in (config.get("layer_quant_config") or {}).items():
        for key in ("weight", "input_tensors"):
            if (layer or {}).get(key) != common.get(key):
                raise unsupported(_METHOD, f"a scheme of its own for {name!r} (only one for all linear layers)")
    if common and "input_tensors" not in common:
        raise unsupported(
            _METHOD, "a global_quant_config without input_tensors (null where activations are not quantised)"
        )
    weight, inputs = common.get("weight"), common.get("input_tensors")
    ignored = tuple(config.get("exclude") or ())
    if isinstance(weight, Mapping) and weight.get("dtype") == "fp4":
        rounded = _rounds_inputs(weight, inputs)
        return with_plain_head(Mxfp4LinearConfig(rounded_inputs=rounded, ignored=ignored), _METHOD, hf)
    scheme = _fp8_scheme(weight, inputs)
    return with_plain_head(Fp8Config(serialized=True, ignored=ignored, **scheme), _METHOD, hf)


def _rounds_inputs(weight: Mapping[str, Any], inputs: Any) -> bool:
    """Whether activations are MXFP4 like the ``weight``, or unquantised."""
    if not _is_mxfp4(weight) or weight.get("is_dynamic"):
        raise unsupported(_METHOD, f"weights of {_described(weight)} (of fp4 only {_MXFP4}, static)")
    if inputs is None:
        return False
    if not isinstance(inputs, Mapping) or not _is_mxfp4(inputs) or not inputs.get("is_dynamic"):
        raise unsupported(
            _METHOD, f"input_tensors of {_described(inputs)} with weights of fp4 (only fp4 {_MXFP4}, dynamic, or none)"
        )
    # The weights have their scales already; the mode matters for the activations' scales, which we compute.
    if (mode := inputs.get("scale_calculation_mode")) not in (None, "even"):
        raise unsupported(_METHOD, f"input_tensors of scale_calculation_mode={mode!r} (only 'even')")
    return True


def _is_mxfp4(tensors: Mapping[str, Any]) -> bool:
    grouped = tensors.get("qscheme") == "per_group" and tensors.get("group_size") == GROUP
    return tensors.get("dtype") == "fp4" and grouped and tensors.get("scale_format") == "e8m0"


def _fp8_scheme(weight: Any, inputs: Any) -> dict[str, Any]:
    for what, tensors, allowed in (("weights", weight, "fp8_e4m3 or fp4"), ("input_tensors", inputs, "fp8_e4m3")):
        if not isinstance(tensors, Mapping) or tensors.get("dtype") != "fp8_e4m3":
            raise unsupported(_METHOD, f"{what} of {_described(tensors)} (only {allowed})")
        if tensors.get("symmetric") is False:  # Quark writes null for formats without zero points
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
    keys = ("dtype", "qscheme", "is_dynamic", "group_size", "block_size", "scale_type", "scale_format")
    return ", ".join(f"{key}={tensors[key]!r}" for key in keys if tensors.get(key) is not None)
