"""Gated DeltaNet of one new token a request on Hopper, in Gluon: states go through shared memory in large copies.

A program has one key head of a request, or of every n-th where programs stay on a multiprocessor, and all value heads
that share it. A single instruction (TMA) copies a piece of a state to a ring of buffers in shared memory; the piece is
updated there, and another instruction copies it back. While a piece is updated, the next ones are on their way in and
the one before on its way out. So memory is busy in both directions at all times, with long runs of adjacent bytes.

A request's other inputs, its row of the projections and the last inputs of its convolution, are loaded to registers
while the request before is worked on. The weights are those of the program's heads, and stay there.

States are asked for before the kernel in front has ended, which must not be one that writes them: two launches of one
layer, one right behind the other, need something in between that waits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_core.batch import Batch, BatchShape
from atom_core.cache import StateView
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_delta_net.triton_parts import assert_layout, gates, located, normed, silu
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load_tile
from atom_core.kernels.linear.tiles import why_no_gluon
from atom_core.kernels.triton_support import launch_options, multiprocessors, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec

#: Gluon renamed this between Triton 3.6 and 3.9.
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_decay_and_beta, _located = gluon.jit(gates.fn), gluon.jit(located.fn)
_normed, _silu = gluon.jit(normed.fn), gluon.jit(silu.fn)

#: Keys, values and the convolution's width; other sizes are Triton's.
_DIM, _WIDTH = 128, 4
#: Bytes of a row of a tile in shared memory: the widest that TMA swizzles, so that threads read without conflicts.
_ROW_BYTES = 128


class Tile(NamedTuple):
    """Of a program."""

    rows: int
    """Of a state, in a piece."""
    stages: int
    """Pieces in shared memory."""
    lag: int
    """After how many pieces a buffer is loaded again: it has been copied out by then."""
    warps: int
    programs: int
    """Of a multiprocessor; 0: as many as there are key heads of requests."""


#: The most value heads of a key head: more need more registers.
_MOST_SHARED = 4
#: The fewest requests: with fewer, one of Triton's many small programs is done sooner.
_MIN_REQUESTS = 32
#: Three pieces are on their way in while a fourth is updated. Of those measured on an H200 it is the fastest.
_TILE = Tile(rows=32, stages=4, lag=1, warps=4, programs=0)


@gluon.jit
def _request(batch, snapshots, request, num_requests):
    """A request's row, slot, the slot of its state, the row of its first input, and whether it has tokens and a state.

    A request past the last has neither. The last value is the slot that a copy is written to, or 0.
    """
    query_start_loc, slots, seq_lens, num_accepted, block_size, stride_slots = batch
    there = request < num_requests
    request = gl.minimum(request, num_requests - 1).to(gl.int64)
    begin = gl.load(query_start_loc + request).to(gl.int64)
    tokens = (gl.load(query_start_loc + request + 1) - begin).to(gl.int32)
    slot, source, has, first, _ = _located(slots, seq_lens, num_accepted, block_size, request, tokens, stride_slots)
    live = there & (tokens > 0) & (slot > 0)
    copy = slot * 0
    if snapshots[0] is not None:
        wanted = gl.load(snapshots[0] + request).to(gl.int64)
        copy = gl.where(live & (gl.load(snapshots[1] + request) > 0), wanted, copy)
    return begin, slot, source, first, live, live & (has > 0), copy


@gluon.jit
def _ask(states, ring, full, place, row, has):
    """Start to copy a piece to its place in the ring; one that no state has is there at once."""
    bar = full.index(place)
    size: gl.constexpr = ring.shape[1] * ring.shape[2] * ring.dtype.primitive_bitwidth // 8
    mbarrier.expect(bar, size, pred=has)
    load_tile(states, [row, 0], bar, ring.index(place), pred=has)
    mbarrier.arrive(bar, pred=has == 0)


@gluon.jit
def _row(source, slot_rows, head, block, V: gl.constexpr, ROWS: gl.constexpr, SPLIT: gl.constexpr):
    """The tile's first row, of 128 bytes, of a block of a value head's state."""
    return source.to(gl.int32) * slot_rows + (head * V + block * ROWS) * SPLIT


@gluon.jit
def _window(conv, slot, first, channel, known, strides):
    """The inputs of the third, second and first token before."""
    at = conv + slot * strides[0] + first * strides[1] + channel.to(gl.int64) * strides[2]
    oldest = gl.load(at, mask=known, other=0.0)
    older = gl.load(at + strides[1], mask=known, other=0.0)
    return oldest, older, gl.load(at + 2 * strides[1], mask=known, other=0.0)


@gluon.jit
def _keep(conv, slot, channel, used, older, old, new, strides):
    """Write the last inputs to a slot's first rows."""
    at = conv + slot * strides[0] + channel.to(gl.int64) * strides[2]
    gl.store(at, older, mask=used)
    gl.store(at + strides[1], old, mask=used)
    gl.store(at + 2 * strides[1], new.to(conv.dtype.element_ty), mask=used)


@gluon.jit
def _taps(weight, channel, used):
    """A convolution's weights of the third, second and first token before, and of the token itself."""
    at = weight + channel * 4
    oldest = gl.load(at, mask=used, other=0.0).to(gl.float32)
    older = gl.load(at + 1, mask=used, other=0.0).to(gl.float32)
    old = gl.load(at + 2, mask=used, other=0.0).to(gl.float32)
    return oldest, older, old, gl.load(at + 3, mask=used, other=0.0).to(gl.float32)


@gluon.jit
def _mixed(oldest, older, old, new, w3, w2, w1, w0):
    """The convolution of a token."""
    before = oldest.to(gl.float32) * w3 + older.to(gl.float32) * w2 + old.to(gl.float32) * w1
    return _silu(before + new.to(gl.float32) * w0)


# The rows of `ba` may be short, and begin anywhere in mixed steps. Slots may be a view of a framework's table.
@entry_kernel
@gluon.jit(do_not_specialize=["num_requests", "stride_slots"], do_not_specialize_on_alignment=["ba"])
def gated_delta_decode_hopper(
    qkvz,
    ba,
    out,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    conv,
    states,
    query_start_loc,
    slots,
    seq_lens,
    num_accepted,
    block_size,
    snapshot_slots,
    snapshot_tokens,
    num_requests,
    eps,
    slot_rows,
    stride_x,
    stride_ba,
    stride_out,
    stride_conv_slot,
    stride_conv_row,
    stride_conv_channel,
    stride_slots,
    HK: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    SHARED_PADDED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """``states``: rows of 128 bytes, ``slot_rows`` of them from a slot to the next."""
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    SHARED: gl.constexpr = HV // HK
    BLOCKS: gl.constexpr = V // ROWS
    PIECES: gl.constexpr = SHARED * BLOCKS
    AHEAD: gl.constexpr = STAGES - LAG
    C: gl.constexpr = 2 * HK * K + HV * V
    SNAPSHOTS: gl.constexpr = snapshot_slots is not None
    INNER: gl.constexpr = states.block_type.shape[1]
    SPLIT: gl.constexpr = K // INNER
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = states.dtype
    gl.static_assert(AHEAD <= PIECES, "pieces of two requests are on their way at most")
    # Eight threads have a row of the state, each 16 bytes of every 128.
    tiled: gl.constexpr = gl.BlockedLayout([SPLIT, INNER // 8], [4, 8], [warps, 1], [1, 0])
    channels: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [warps], [0])
    of_values: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
    nothing = gl.zeros([ROWS * SPLIT, INNER], gl.float32, tiled).reshape([ROWS, K])
    whole: gl.constexpr = nothing.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, whole)
    of_keys: gl.constexpr = gl.SliceLayout(0, whole)

    ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS * SPLIT, INNER], states.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mixed_qk = gl.allocate_shared_memory(gl.float32, [2 * K], plain)
    mixed_v = gl.allocate_shared_memory(gl.float32, [SHARED_PADDED * V], plain)
    decays = gl.allocate_shared_memory(gl.float32, [SHARED_PADDED * V], plain)
    betas = gl.allocate_shared_memory(gl.float32, [SHARED_PADDED * V], plain)
    values = gl.allocate_shared_memory(gl.float32, [SHARED_PADDED * V], plain)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    barrier()

    key_head = gl.program_id(0) % HK
    head = key_head * SHARED
    first_request = gl.program_id(0) // HK
    step = gl.num_programs(0) // HK
    batch = (query_start_loc, slots, seq_lens, num_accepted, block_size, stride_slots)
    snapshots = (snapshot_slots, snapshot_tokens)
    strides = (stride_conv_slot, stride_conv_row, stride_conv_channel)
    begin, slot, source, first, live, has, copy = _request(batch, snapshots, first_request, num_requests)
    for piece in gl.static_range(AHEAD):
        row = _row(source, slot_rows, head + piece // BLOCKS, piece % BLOCKS, V, ROWS, SPLIT)
        _ask(states, ring, full, piece, row, has)
    next_begin, next_slot, next_source, next_first, next_live, next_has, next_copy = _request(
        batch, snapshots, first_request + step, num_requests
    )
    dim = gl.arange(0, 2 * K, channels)
    qk_channel = dim // K * (HK * K) + key_head * K + dim % K
    qk_used = dim >= 0
    lane = gl.arange(0, SHARED_PADDED * V, channels)
    v_used = lane < SHARED * V
    v_channel = 2 * HK * K + head * V + lane
    v_head = head + lane // V
    qk3, qk2, qk1 = _window(conv, slot, first, qk_channel, has & qk_used, strides)
    v3, v2, v1 = _window(conv, slot, first, v_channel, has & v_used, strides)
    qk_w3, qk_w2, qk_w1, qk_w0 = _taps(conv_weight, qk_channel, qk_used)
    v_w3, v_w2, v_w1, v_w0 = _taps(conv_weight, v_channel, v_used)
    log_rate = gl.load(a_log + v_head, mask=v_used, other=0.0).to(gl.float32)
    bias = gl.load(dt_bias + v_head, mask=v_used, other=0.0).to(gl.float32)
    column = gl.arange(0, V, gl.SliceLayout(0, of_values))
    shared = gl.arange(0, SHARED_PADDED, gl.SliceLayout(1, of_values))
    norm = gl.load(norm_weight + column).to(gl.float32)[None, :]
    within = (head + shared)[:, None] * V + column[None, :]
    within_used = (shared < SHARED)[:, None] & (column >= 0)[None, :]
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    x = qkvz + begin * stride_x
    qk = gl.load(x + qk_channel, mask=live & qk_used, other=0.0)
    v = gl.load(x + v_channel, mask=live & v_used, other=0.0)
    b = gl.load(ba + begin * stride_ba + v_head, mask=live & v_used, other=0.0)
    a = gl.load(ba + begin * stride_ba + HV + v_head, mask=live & v_used, other=0.0)

    place = 0
    phase = 0
    asked = AHEAD
    for request in range(first_request, num_requests, step):
        z = gl.load(qkvz + begin * stride_x + C + within, mask=live & within_used, other=0.0)
        decay_all, beta_all = _decay_and_beta(a.to(gl.float32), b.to(gl.float32), log_rate, bias)
        mixed_qk.store(_mixed(qk3, qk2, qk1, qk, qk_w3, qk_w2, qk_w1, qk_w0))
        mixed_v.store(_mixed(v3, v2, v1, v, v_w3, v_w2, v_w1, v_w0))
        decays.store(gl.exp(decay_all))
        betas.store(beta_all)
        _keep(conv, slot, qk_channel, live & qk_used, qk2, qk1, qk, strides)
        _keep(conv, slot, v_channel, live & v_used, v2, v1, v, strides)
        if SNAPSHOTS:
            _keep(conv, copy, qk_channel, (copy > 0) & qk_used, qk2, qk1, qk, strides)
            _keep(conv, copy, v_channel, (copy > 0) & v_used, v2, v1, v, strides)
        # What the next request needs.
        qk3, qk2, qk1 = _window(conv, next_slot, next_first, qk_channel, next_has & qk_used, strides)
        v3, v2, v1 = _window(conv, next_slot, next_first, v_channel, next_has & v_used, strides)
        x = qkvz + next_begin * stride_x
        qk = gl.load(x + qk_channel, mask=next_live & qk_used, other=0.0)
        v = gl.load(x + v_channel, mask=next_live & v_used, other=0.0)
        b = gl.load(ba + next_begin * stride_ba + v_head, mask=next_live & v_used, other=0.0)
        a = gl.load(ba + next_begin * stride_ba + HV + v_head, mask=next_live & v_used, other=0.0)
        later_begin, later_slot, later_source, later_first, later_live, later_has, later_copy = _request(
            batch, snapshots, request + 2 * step, num_requests
        )

        query = _normed(mixed_qk.slice(0, K).load(of_keys)) * (K**-0.5)
        key = _normed(mixed_qk.slice(K, K).load(of_keys))
        both = gl.sum(query * key, 0)
        for piece in gl.static_range(PIECES):
            buffer = ring.index(place)
            if live:
                mixed = mixed_v.slice(piece * ROWS, ROWS).load(of_rows)
                decay = decays.slice(piece * ROWS, ROWS).load(of_rows)
                beta = betas.slice(piece * ROWS, ROWS).load(of_rows)
                mbarrier.wait(full.index(place), phase)
                state = buffer.load(tiled).to(gl.float32).reshape([ROWS, K])
                state = gl.where(has, state, 0.0)
                # The state's answers before the token, which do not wait for each other.
                known = gl.sum(state * key[None, :], 1)
                question = gl.sum(state * query[None, :], 1)
                added = beta * (mixed - decay * known)
                state = state * decay[:, None] + added[:, None] * key[None, :]
                buffer.store(gl.convert_layout(state.reshape([ROWS * SPLIT, INNER]).to(dtype), tiled))
                answer = decay * question + both * added
                values.slice(piece * ROWS, ROWS).store(answer)
                fence_async_shared()
                barrier()
                tma.store_wait(LAG - 1)
                row = _row(slot, slot_rows, head + piece // BLOCKS, piece % BLOCKS, V, ROWS, SPLIT)
                _store_tile(states, [row, 0], buffer)
                if SNAPSHOTS:  # noqa: SIM102 - constexpr, unlike the next
                    if copy > 0:
                        row = _row(copy, slot_rows, head + piece // BLOCKS, piece % BLOCKS, V, ROWS, SPLIT)
                        _store_tile(states, [row, 0], buffer)
            else:
                tma.store_wait(0)
            # The buffer that the piece ``LAG`` before has left.
            if piece + AHEAD < PIECES:
                row = _row(
                    source, slot_rows, head + (piece + AHEAD) // BLOCKS, (piece + AHEAD) % BLOCKS, V, ROWS, SPLIT
                )
                _ask(states, ring, full, asked, row, has)
            else:
                row = _row(
                    next_source, slot_rows, head + (piece + AHEAD - PIECES) // BLOCKS,
                    (piece + AHEAD - PIECES) % BLOCKS, V, ROWS, SPLIT,
                )  # fmt: skip
                _ask(states, ring, full, asked, row, next_has)
            asked = gl.where(asked == STAGES - 1, 0, asked + 1)
            phase = gl.where(place == STAGES - 1, phase ^ 1, phase)
            place = gl.where(place == STAGES - 1, 0, place + 1)

        wide = values.load(flat).reshape([SHARED_PADDED, V])
        wide = gl.convert_layout(wide, of_values)
        factor = gl.rsqrt(gl.sum(wide * wide, 1) / V + eps)[:, None]
        gated = (wide * factor * norm * _silu(z.to(gl.float32))).to(out.dtype.element_ty)
        gl.store(out + begin * stride_out + within, gated, mask=live & within_used, eviction_policy=EVICT_LAST)
        begin, slot, source, live, has, copy = next_begin, next_slot, next_source, next_live, next_has, next_copy
        next_begin, next_slot, next_source, next_first = later_begin, later_slot, later_source, later_first
        next_live, next_has, next_copy = later_live, later_has, later_copy
    tma.store_wait(0)


@functools.lru_cache
def _layout(tile: Tile, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """A piece's in shared memory; to make one takes as long as a launch."""
    shape = [tile.rows * _DIM * dtype.itemsize // _ROW_BYTES, _ROW_BYTES // dtype.itemsize]
    return gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if dtype == torch.float32 else gl.bfloat16)


class HopperGatedDeltaDecode:
    """What :class:`.triton_decode.TritonGatedDeltaDecode` runs batches by for which :meth:`takes` is true.

    Args:
        spec: the layer.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        tile: None: the fastest that was measured.
    """

    def __init__(self, spec: GatedDeltaNetSpec, overlap: bool, tile: Tile | None = None) -> None:
        self.spec, self.overlap = spec, overlap
        self.tile = tile or _TILE

    @staticmethod
    def fits(spec: GatedDeltaNetSpec, tile: Tile = _TILE) -> bool:
        """Whether the kernel supports a layer, on Hopper."""
        sizes = (spec.key_dim, spec.value_dim, spec.conv_width) == (_DIM, _DIM, _WIDTH)
        shared = spec.num_value_heads // spec.num_key_heads
        enough = tile.stages - tile.lag <= shared * _DIM // tile.rows
        states = spec.state_dtype in (torch.float32, torch.bfloat16)
        return sizes and shared <= _MOST_SHARED and enough and states and why_no_gluon() is None

    def takes(self, cache: StateView, batch: Batch) -> bool:
        """Whether it can run this batch and, during a capture, every batch that the graph can replay."""
        recurrent, states = cache.tensors[1], batch.states
        assert states is not None
        row = _ROW_BYTES // recurrent.itemsize
        aligned = recurrent.stride(0) % row == 0 and recurrent.data_ptr() % 16 == 0
        few = len(recurrent) * recurrent.stride(0) // row < 2**31  # rows are counted in 32 bits
        return self.takes_shape(batch) and states.verifies is None and aligned and few

    def takes_shape(self, batch: Batch | BatchShape) -> bool:
        """The same, of requests that do not verify, and states that are aligned."""
        return batch.max_query_len == 1 and batch.num_requests >= _MIN_REQUESTS

    def __call__(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        cache: StateView,
        batch: Batch,
        out: torch.Tensor,
    ) -> None:
        """Write the outputs of the requests' tokens to ``out``, and their states to the cache."""
        spec, states, tile = self.spec, batch.states, self.tile
        assert states is not None
        assert batch.max_query_len == 1
        (conv, recurrent), snapshots = cache.tensors, states.snapshots
        assert_layout(spec, qkvz, ba, weights, recurrent, out)
        num_requests, heads = states.slots.shape[0], spec.num_key_heads
        of_state = spec.num_value_heads * spec.value_dim * spec.key_dim
        inner = _ROW_BYTES // recurrent.itemsize
        slot_rows = recurrent.stride(0) // inner
        rows = (recurrent.shape[0] - 1) * slot_rows + of_state // inner
        block = [tile.rows * spec.key_dim // inner, inner]
        descriptor = TensorDescriptor(recurrent, [rows, inner], [inner, 1], block, _layout(tile, recurrent.dtype))
        at_once = num_requests
        if tile.programs:
            at_once = min(num_requests, max(1, tile.programs * multiprocessors(qkvz.device) // heads))
        gated_delta_decode_hopper[(heads * at_once,)](
            qkvz,
            ba,
            out,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            conv,
            descriptor,
            batch.query_start_loc,
            states.slots,
            batch.seq_lens,
            states.num_accepted,
            None if states.blocks is None else states.blocks.size,
            None if snapshots is None else snapshots.slots,
            None if snapshots is None else snapshots.tokens,
            num_requests,
            weights.eps,
            slot_rows,
            qkvz.stride(0),
            ba.stride(0),
            out.stride(0),
            *conv.stride(),
            states.slots.stride(0),
            HK=heads,
            HV=spec.num_value_heads,
            K=spec.key_dim,
            V=spec.value_dim,
            ROWS=tile.rows,
            STAGES=tile.stages,
            LAG=tile.lag,
            SHARED_PADDED=next_power_of_2(spec.num_value_heads // heads),
            OVERLAP=self.overlap,
            num_warps=tile.warps,
            **launch_options(self.overlap),
        )
