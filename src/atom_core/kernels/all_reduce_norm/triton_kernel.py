"""The all-reduce, the residual's addition and the norm in one Triton kernel that reads the other ranks' memory.

A program takes some of the rows. It copies its rank's partial sums to memory that all ranks see, waits for the program
of the same number on every other rank, and then reads all ranks' partial sums in the order of the ranks: all ranks add
the same values in the same order. Nothing is reset between launches and the counters are on the device, so a captured
graph can be replayed.

A program is never more than one launch ahead of those of its number on other ranks, as it waits for their signals. So
two alternating halves of its memory are enough: it writes to a half again only after a signal that slower ranks send
when they have read it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.all_reduce_norm.peer_memory import COUNTER_PITCH, HALF, PROGRAMS, SHARES, PeerMemory, Peers
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import next_power_of_2, takes_amd_assembly

#: The most bytes of ``x``; above, a reduce-scatter and an all-gather read less.
MAX_BYTES = {2: 512 * 1024, 3: 512 * 1024, 4: 512 * 1024}
MAX_BYTES_OF_MORE = 256 * 1024


@triton.jit
def _meet(
    peers,
    rank,
    program,
    arrivals,
    PITCH: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    AMD: tl.constexpr,
):
    """Wait until the programs of this number are here on all ranks: ``arrivals`` in all launches so far.

    The count may include one rank's next arrival instead of another's: that rank has seen all arrivals of this launch.
    """
    if AMD:
        # One wave sends the signal below. Its release may not cover the other waves' stores, for which a barrier alone
        # does not wait (see is_last of attention), and LLVM before https://github.com/llvm/llvm-project/pull/178316,
        # as in Triton 3.6.0, may send it before the write-back. So each wave writes back and waits.
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )
    # All threads' stores come before the signal, and their loads after the wait.
    tl.debug_barrier()
    lanes = tl.arange(0, LANES)
    there = lanes < WORLD
    counters = tl.load(peers + lanes, mask=there, other=0).to(tl.pointer_type(tl.int32)) + program * PITCH
    tl.atomic_add(counters, 1, mask=there, sem="release", scope="sys")
    mine = tl.load(peers + rank).to(tl.pointer_type(tl.int32)) + program * PITCH
    # Counts wrap around, so compare their difference with 0.
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") - arrivals < 0:
        pass
    tl.debug_barrier()


@entry_kernel
@triton.jit(do_not_specialize=["rank", "num_rows"])
def _all_reduce_norm(
    x,
    residual,
    weight,
    out,
    peers,
    rounds,
    eps,
    stride_x,
    stride_residual,
    rank,
    num_rows,
    N: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    COUNTERS: tl.constexpr,
    SHARES: tl.constexpr,
    HALF: tl.constexpr,
    MEET: tl.constexpr,
    AMD: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    used = columns < N
    met = tl.load(rounds + program)
    share = SHARES + (program * 2 + (met & 1)).to(tl.int64) * HALF
    pointer = tl.pointer_type(x.dtype.element_ty)
    mine = tl.multiple_of((tl.load(peers + rank) + share).to(pointer), 16)
    # The addresses are loaded before the wait.
    theirs = ()
    for peer in tl.static_range(WORLD):
        theirs = theirs + ((tl.load(peers + peer) + share).to(pointer),)  # type: ignore[assignment]  # noqa: RUF005 - Triton unpacks no stars
    rows = tl.cdiv(num_rows - program, programs)
    for index in range(rows):
        row = (program + index * programs).to(tl.int64)
        partial = tl.load(x + row * stride_x + columns, mask=used, other=0.0)
        tl.store(mine + index * PITCH + columns, partial, mask=used)
    if MEET:
        _meet(peers, rank, program, (met + 1) * WORLD, COUNTERS, WORLD, LANES, AMD)
    scale = tl.load(weight + columns, mask=used, other=0.0).to(tl.float32)
    for index in range(rows):
        row = (program + index * programs).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            source = tl.multiple_of(theirs[peer], 16) + index * PITCH
            total += tl.load(source + columns, mask=used, other=0.0).to(tl.float32)
        stream = residual + row * stride_residual + columns
        # The norm reads the rounded sum, which is also what the next layer adds to.
        values = (total + tl.load(stream, mask=used, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(stream, values, mask=used)
        wide = values.to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / N + eps)
        normed = (wide * factor * scale).to(out.dtype.element_ty)
        tl.store(out + row * N + columns, normed, mask=used)
    tl.store(rounds + program, met + 1)


class OneShot:
    """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`; the residual is added to in place."""

    def __init__(self, memory: PeerMemory, world_size: int, *, nvidia: bool) -> None:
        self.memory, self.nvidia = memory, nvidia
        self.max_bytes = MAX_BYTES.get(world_size, MAX_BYTES_OF_MORE)

    def takes(self, x: torch.Tensor) -> bool:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        return 0 < x.numel() * x.itemsize <= self.max_bytes

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        return all_reduce_norm(x, residual, weight, eps, self.memory.peers(), nvidia=self.nvidia), residual


def all_reduce_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: Peers,
    *,
    nvidia: bool,
    meet: bool = True,
) -> torch.Tensor:
    """``y``, with ``residual`` added to in place; see :mod:`atom_core.kernels.all_reduce_norm`.

    ``nvidia``: whether the GPU is NVIDIA's, with 32 threads in a warp; gfx942 and gfx950 have 64.
    ``meet``: whether ranks wait for each other. Without it, the others' partial sums have to be there already.
    """
    num_rows, size = x.shape
    assert x.stride(1) == residual.stride(1) == 1
    pitch = -(-size // 8) * 8  # a row begins at 16 bytes
    programs = min(num_rows, PROGRAMS)
    assert -(-num_rows // programs) * pitch * x.itemsize <= HALF, "more rows than a program has memory for"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(size)
    _all_reduce_norm[(programs,)](
        x,
        residual,
        weight,
        out,
        peers.addresses,
        peers.rounds,
        eps,
        x.stride(0),
        residual.stride(0),
        peers.rank,
        num_rows,
        N=size,
        PITCH=pitch,
        BLOCK=block,
        WORLD=peers.world_size,
        LANES=next_power_of_2(peers.world_size),
        COUNTERS=COUNTER_PITCH // 4,
        SHARES=SHARES,
        HALF=HALF,
        MEET=meet,
        AMD=takes_amd_assembly(nvidia),
        num_warps=min(16, max(4, block // (256 if nvidia else 512))),  # a thread reads 16 bytes at once
    )
    return out
