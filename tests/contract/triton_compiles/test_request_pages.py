"""The page table of each request compiles for each GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atom_core.kernels.request_pages import RequestPagesSpec
from atom_core.kernels.request_pages import triton_kernel as pages_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu


@every_gpu
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("windowed", [False, True], ids=["one pool", "two pools"])
def test_request_pages_compiles(page_size, windowed, gpu):
    ints = partial(torch.zeros, dtype=torch.int32)
    longs = partial(torch.zeros, dtype=torch.int64)
    moved = (longs(1000), ints(3, 8)) if windowed else (None, None)
    with compiles(pages_kernel, "_request_pages", gpu):
        pages_kernel.TritonRequestPages(RequestPagesSpec(page_size))(
            ints(9, 8 * page_size), longs(3), longs(3), 1, ints(3), ints(3, 8), *moved
        )
