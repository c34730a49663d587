"""Keys of ``quantization_config``: which a method's reader reads, which are harmless, and which are refused.

The same rule as for ``config.json`` (:mod:`atom_core.hf_keys`): nothing is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from atom_core.hf_keys import asks_for_nothing, logger
from atom_core.quant.errors import unsupported

#: What the readers read, by ``quant_method``.
_READ: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        method: frozenset(f"quant_method {keys}".split())
        for method, keys in {
            "fp8": "activation_scheme ignored_layers modules_to_not_convert weight_block_size",
            "compressed-tensors": "config_groups ignore sparsity_config transform_config",
            # Its groups describe what ``quant_algo`` names.
            "modelopt": "quantization quant_algo ignore exclude_modules config_groups targets",
            "mxfp4": "modules_to_not_convert",
            "quark": "exclude global_quant_config layer_quant_config layer_type_quant_config",
        }.items()
    }
)
#: What the tensors say themselves, what a cache's scales are read by, and what tools leave behind.
_HARMLESS = frozenset(
    "algo_config export format global_compression_ratio kv_cache_post_rope kv_cache_quant_algo kv_cache_quant_config "
    "kv_cache_scheme min_kv_scale producer quant_mode quantization_status run_compressed scale_fmt "
    "softmax_quant_spec version".split()
)
#: Keys at the one value that is what is done anyway.
_FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"fmt": ("e4m3",), "is_checkpoint_fp8_serialized": (True,)})
#: Keys with a meaning in some method: where they are none of this one's, they are not left aside.
_MEANINGFUL = frozenset(
    "act_order activation_dtype bits checkpoint_format damp_percent data_type desc_act dynamic fmt format_version "
    "group_size input_scale_format is_checkpoint_fp8_serialized lm_head load_in_4bit load_in_8bit modules_to_convert "
    "pack_dtype quant_type scale_dtype store_dtype sym true_sequential use_double_quant weight_bits weight_dtype "
    "weight_per_channel weight_per_tensor zero_point".split()
).union(*_READ.values())


def check_keys(method: str, config: Mapping[str, Any]) -> None:
    """Account for the keys of ``config`` that the reader of ``method`` does not read.

    Raises:
        ValueError: one with a meaning in some method, at a value that asks for it.
    """
    unknown = []
    for key, value in config.items():
        if key in _READ[method] or key in _HARMLESS or asks_for_nothing(key, value) or value in _FIXED.get(key, ()):
            continue
        if key in _MEANINGFUL:
            raise unsupported(method, f"{key}={str(value)[:60]!r}")
        unknown.append(key)
    if unknown:
        logger.warning("Keys of quantization_config that no model reads are left aside: %s", ", ".join(sorted(unknown)))
