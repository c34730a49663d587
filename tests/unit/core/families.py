"""Every family, as tests make small random models of it."""

from __future__ import annotations

from tests.unit.core.hugging_face import FAMILIES, Family
from tests.unit.core.models import (
    test_deepseek,
    test_glm4_moe,
    test_gpt_oss,
    test_mixtral,
    test_qwen3_5,
    test_qwen3_moe,
)

ALL_FAMILIES: tuple[Family, ...] = (
    *FAMILIES,
    test_qwen3_moe.FAMILY,
    test_mixtral.FAMILY,
    test_gpt_oss.FAMILY,
    test_glm4_moe.FAMILY,
    test_deepseek.V2,
    test_deepseek.V3,
    test_qwen3_5.NEXT,
    test_qwen3_5.DENSE,
    test_qwen3_5.MOE,
)
