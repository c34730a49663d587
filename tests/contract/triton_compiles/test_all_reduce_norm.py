"""The all-reduce with the norm behind it compiles for each GPU, and its signals hold for other GPUs."""

from __future__ import annotations

import re

import pytest
import torch

from atom_core.kernels.all_reduce_norm import MAX_ROW
from atom_core.kernels.all_reduce_norm import triton_kernel as reducing_kernel
from atom_core.kernels.all_reduce_norm.peer_memory import PROGRAMS, Peers
from tests.contract.triton_compiles.compiling import GPUS, amd_instructions, compiles, zeros

#: Every wave writes back what it has stored and waits until that is done, then for the other waves, before one signals.
SIGNAL = re.compile(
    r"\b(buffer|global)_store_\w+ (?:(?!_store_|_atomic_).)*?\bbuffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)\s"
    r"(?:(?!_store_|_atomic_).)*?\bs_barrier\b(?:(?!_store_).)*?\bglobal_atomic_add [^\n]+ sc1\b",
    re.DOTALL,
)


@pytest.mark.parametrize(
    ("size", "gpu"),
    [(size, gpu) for size in (4096, 7168, 16384, 2881) for gpu in GPUS if gpu.nvidia or 2 * size <= MAX_ROW["rocm"]],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_reduce_norm_compiles(world_size, size, gpu):
    peers = Peers(1, torch.zeros(world_size, dtype=torch.int64), torch.zeros(PROGRAMS, dtype=torch.int32))
    with compiles(reducing_kernel, "_all_reduce_norm", gpu) as found:
        reducing_kernel.all_reduce_norm(zeros(3, size), zeros(3, size), zeros(size), 1e-6, peers, nvidia=gpu.nvidia)
    # A signal and a wait that hold for other GPUs, and parts read in as many bytes as a thread can.
    if gpu.nvidia:
        text = found.compiled.asm["ptx"]
        assert re.search(r"(red|atom)\.global\.sys\.release\.add", text)
        assert re.search(r"(ld|atom)\.global\.sys\.acquire", text)
        wide = r"ld\.global\.v4\.b32"
    else:
        text = amd_instructions(found.compiled)
        assert SIGNAL.search(text)
        assert re.search(
            r"(global_atomic_add|global_load_dword) .* sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+buffer_inv sc0 sc1", text
        )
        wide = r"(buffer|global)_load_dwordx4"
    if size % 8 == 0:
        # Of a row: each rank's part and the residual, and this rank's when it is copied.
        assert len(re.findall(wide, text)) >= world_size + 2
