"""A product for each head compiles for each GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.kernels.head_linear import triton_kernel as head_linear_kernel
from tests.contract.triton_compiles.compiling import CPU, compiles, every_gpu
from tests.latent_cases import check_head_linear


@every_gpu
@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("sizes", [(128, 512, 64), (512, 128, 0)], ids=["into latents", "out of latents"])
def test_products_for_each_head_compile(sizes, tokens, gpu):
    launch = partial(head_linear_kernel.head_linear, overlap=gpu.nvidia)
    for dtype in (torch.bfloat16, torch.float32):
        with compiles(head_linear_kernel, "_head_linear", gpu):
            check_head_linear(launch, (tokens, 16, *sizes), dtype, CPU, transposed=sizes[2] == 0)
