"""The embedding compiles for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.embedding import triton_kernel as embedding_kernel
from tests.contract.triton_compiles.compiling import Launched, Recorder, compile_launch, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("first", [None, 1000])
def test_embedding_compiles(monkeypatch, first, gpu):
    kernel = embedding_kernel._embedding
    monkeypatch.setattr(embedding_kernel, "_embedding", Recorder())
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(Launched) as launched:
        embedding_kernel.embedding(ids, zeros(10, 4096), first)
    compile_launch(kernel, launched.value, gpu)
