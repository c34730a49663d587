"""The norm of queries and keys, rope and the cache's write compile in one launch for each GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.cache import SHUFFLED
from atom_core.kernels.qk_norm_rope_cache import triton_kernel as qkv_kernel
from tests.contract.triton_compiles.compiling import CPU, FP8_CACHES, GPUS, compiles
from tests.kernel_cases import QkvCase, check_qkv

QKV = {
    "Qwen3 8B, bfloat16": (QkvCase("", heads=8, dim=128, rotary_dim=128, qk_norm=True), torch.bfloat16),
    "interleaved and partial, float16": (QkvCase("", dim=64, rotary_dim=32, interleaved=True), torch.float16),
    "shuffled pages, bfloat16": (
        QkvCase("", heads=8, dim=128, rotary_dim=128, qk_norm=True, storage=SHUFFLED),
        torch.bfloat16,
    ),
    "an odd head, float32": (QkvCase("", dim=80, rotary_dim=80, page_size=64), torch.float32),
}


@pytest.mark.parametrize(("gpu", "cache_dtype"), [*((gpu, None) for gpu in GPUS), *FP8_CACHES], ids=str)
@pytest.mark.parametrize("name", QKV)
def test_qk_norm_rope_cache_compiles(name, gpu, cache_dtype):
    case, dtype = QKV[name]
    launch = partial(qkv_kernel.qk_norm_rope_cache, spec=case.spec(dtype), overlap=gpu.nvidia)
    with compiles(qkv_kernel, "_qk_norm_rope_cache", gpu):
        check_qkv(case, launch, dtype, CPU, cache_dtype=cache_dtype)
