"""The absorbed query projection of MLA compiles for each GPU."""

from __future__ import annotations

import pytest

from atom_core.kernels.mla_absorbed_queries import triton_kernel as queries_kernel
from tests.contract.triton_compiles.compiling import CPU, FP8_CACHES, GPUS, LATENTS, compiles
from tests.latent_cases import check_mla_absorbed_queries


@pytest.mark.parametrize(("gpu", "cache_dtype"), [*((gpu, None) for gpu in GPUS), *FP8_CACHES], ids=str)
@pytest.mark.parametrize("name", ["16 heads, bfloat16", "128 heads, float16, one token a page"])
@pytest.mark.parametrize("tokens", [7, 100])
def test_folded_queries_compile(name, gpu, cache_dtype, tokens):
    case, dtype = LATENTS[name]
    launch = queries_kernel.TritonMlaAbsorbedQueries(case.spec(dtype).latent, overlap=gpu.nvidia)
    with compiles(queries_kernel, "_mla_absorbed_queries", gpu):
        check_mla_absorbed_queries(case, launch, dtype, CPU, cache_dtype, min(tokens, launch.max_tokens))
