"""The write of MLA's cache compiles for each GPU."""

from __future__ import annotations

from functools import partial

import pytest

from atom_core.kernels.mla_cache import triton_kernel as mla_cache_kernel
from tests.contract.triton_compiles.compiling import CPU, FP8_CACHES, GPUS, LATENTS, compiles
from tests.latent_cases import check_mla_cache


@pytest.mark.parametrize(("gpu", "cache_dtype"), [*((gpu, None) for gpu in GPUS), *FP8_CACHES], ids=str)
@pytest.mark.parametrize("name", ["16 heads, bfloat16", "128 heads, float16, one token a page"])
def test_mla_cache_compiles(name, gpu, cache_dtype):
    case, dtype = LATENTS[name]
    launch = partial(mla_cache_kernel.mla_cache, spec=case.spec(dtype).latent, overlap=gpu.nvidia)
    with compiles(mla_cache_kernel, "_mla_cache", gpu):
        check_mla_cache(case, launch, dtype, CPU, cache_dtype)
