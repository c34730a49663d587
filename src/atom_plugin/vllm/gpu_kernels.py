"""GPU kernels of vLLM that can replace ours."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import cast

from atom_core.kernels.attention import ATTENTION, TRITON_AND_FLASH_ATTENTION_3
from atom_core.kernels.attention.long_prompts import triton_and_flash_attention_3
from atom_core.kernels.mla_attention import MLA_ATTENTION
from atom_core.kernels.select import Implementation
from atom_plugin.vllm.flash_attention import VllmFlashAttention3, why_not_here
from atom_plugin.vllm.flash_mla_attention import build_both_mla, why_no_both_mla


def gpu_kernels() -> Mapping[str, Implementation[Hashable, object]]:
    """By op name."""
    found = {
        ATTENTION.name: triton_and_flash_attention_3(why_not_here, VllmFlashAttention3),
        MLA_ATTENTION.name: Implementation(TRITON_AND_FLASH_ATTENTION_3, why_no_both_mla, build_both_mla),
    }
    return cast("Mapping[str, Implementation[Hashable, object]]", found)
