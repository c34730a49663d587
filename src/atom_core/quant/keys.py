"""Keys of ``quantization_config`` that are read, harmless, or refused; as in :mod:`atom_core.hf_keys`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from atom_core.hf_keys import is_neutral, logger
from atom_core.quant.errors import unsupported

#: Keys that the readers read, by ``quant_method``.
_READ: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        method: frozenset(f"quant_method {keys}".split())
        for method, keys in {
            "fp8": "activation_scheme ignored_layers modules_to_not_convert weight_block_size",
            "compressed-tensors": "config_groups ignore sparsity_config transform_config",
            # Its groups repeat what ``quant_algo`` says.
            "modelopt": "quantization quant_algo ignore exclude_modules config_groups targets",
            "mxfp4": "modules_to_not_convert",
            "quark": "exclude global_quant_config layer_quant_config layer_type_quant_config",
        }.items()
    }
)
#: Keys that repeat what the tensors show, describe the cache's scales, or record the tool.
_HARMLESS = frozenset(
    "algo_config export format global_compression_ratio kv_cache_post_rope kv_cache_quant_algo kv_cache_quant_config "
    "kv_cache_scheme min_kv_scale producer quant_mode quantization_status run_compressed scale_fmt "
    "softmax_quant_spec version".split()
)
#: Keys that are supported at these values only.
_FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"fmt": ("e4m3",), "is_checkpoint_fp8_serialized": (True,)})
#: Keys with a meaning in some method; other methods refuse them.
_MEANINGFUL = frozenset(
    "act_order activation_dtype bits checkpoint_format damp_percent data_type desc_act dynamic fmt format_version "
    "group_size input_scale_format is_checkpoint_fp8_serialized lm_head load_in_4bit load_in_8bit modules_to_convert "
    "pack_dtype quant_type scale_dtype store_dtype sym true_sequential use_double_quant weight_bits weight_dtype "
    "weight_per_channel weight_per_tensor zero_point".split()
).union(*_READ.values())


def check_keys(method: str, config: Mapping[str, Any]) -> None:
    """Check the keys of ``config`` that the reader of ``method`` does not read; unknown keys are one warning.

    Raises:
        ValueError: a key has a meaning in some method, and its value is not neutral.
    """
    unknown = []
    for key, value in config.items():
        if key in _READ[method] or key in _HARMLESS or is_neutral(key, value) or value in _FIXED.get(key, ()):
            continue
        if key in _MEANINGFUL:
            raise unsupported(method, f"{key}={str(value)[:60]!r}")
        unknown.append(key)
    if unknown:
        logger.warning("Keys of quantization_config that no model reads are ignored: %s", ", ".join(sorted(unknown)))
