"""The embedding compiles for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.embedding import triton_kernel as embedding_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("first", [None, 1000])
def test_embedding_compiles(first, gpu):
    ids = torch.zeros(3, dtype=torch.int32)
    with compiles(embedding_kernel, "_embedding", gpu):
        embedding_kernel.embedding(ids, zeros(10, 4096), first)
