"""From raw qkv to a query and a filled cache: the reference, and the Triton kernel under Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.kernels.qk_norm_rope_cache.cpu import qk_norm_rope_cache as on_cpu
from atom_core.kernels.qk_norm_rope_cache.reference import qk_norm_rope_cache
from tests.kernel_cases import QKV_CASES, check_qkv

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", QKV_CASES, ids=str)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_norms_rotates_and_writes(case, dtype):
    check_qkv(case, partial(qk_norm_rope_cache, spec=case.spec(dtype)), dtype, CPU)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_the_torch_kernel_norms_rotates_and_writes(case, dtype, padded):
    check_qkv(case, partial(on_cpu, spec=case.spec(dtype)), dtype, CPU, padded=padded)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter cuts bfloat16 off
def test_the_triton_kernel_norms_rotates_and_writes(case, dtype):
    from atom_core.kernels.qk_norm_rope_cache.triton_kernel import qk_norm_rope_cache as launch

    check_qkv(case, partial(launch, spec=case.spec(dtype)), dtype, CPU)
