"""GPU kernels of SGLang that can replace ours."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, cast

from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM
from atom_core.kernels.attention import ATTENTION
from atom_core.kernels.attention.long_prompts import triton_and_flash_attention_3
from atom_core.kernels.select import Implementation
from atom_plugin.sglang.all_reduce import aiter_all_reduce_norm
from atom_plugin.sglang.flash_attention import SglangFlashAttention3, why_not_here


def gpu_kernels(group: Any = None) -> Mapping[str, Implementation[Hashable, object]]:
    """By op name. ``group`` is a model's tensor-parallel one; None: no model is built with them."""
    found = {
        ATTENTION.name: triton_and_flash_attention_3(why_not_here, SglangFlashAttention3),
        ALL_REDUCE_NORM.name: aiter_all_reduce_norm(group),
    }
    return cast("Mapping[str, Implementation[Hashable, object]]", found)
