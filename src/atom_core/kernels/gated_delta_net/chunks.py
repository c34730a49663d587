"""Gated DeltaNet of prompts in Triton, in chunks of 64 tokens (arXiv 2412.06464, section 3.3): four kernels.

:func:`mix` makes queries, keys and values. With ``G`` the sum of ``g`` from a chunk's first token to each token,

    A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i;   T = (1 + A)^-1
    u = T (beta v);   w = T (beta exp(G) k)                                         :func:`solve`, any order of chunks
    u -= w S^T;   S = exp(G_last) S + sum_i exp(G_last - G_i) u_i k_i^T              :func:`carry`, chunk after chunk
    o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) u_j               :func:`answer`, any order of chunks

where ``S`` is the state before the chunk. A chunk belongs to one request: request ``r``, which begins at token ``t``,
has the places from ``t // 64 + r`` on, so a program finds its chunk without the host.

Between the kernels a place has whole tiles, zero behind the last token and behind K and V, which are padded to ``P``:
``mixed [places, 2 HK + HV, 64, P]`` (queries, keys, values), ``w [places, HV, 64, P]``, ``u [places, HV, P, 64]``,
float32 ``totals [places, HV, 64]``, which is ``G``, and ``states [places, HV, P, P]``, a row for each value. So what
waits for the chunk before has no masks, and the state stays in registers, as the left side of its products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.attention.triton_parts import range_of
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_delta_net.reference import CHUNK as _CHUNK
from atom_core.kernels.gated_delta_net.triton_parts import L2_EPS, gates, located, own_slot, seen, silu
from atom_core.kernels.launch import entry_kernel

CHUNK = tl.constexpr(_CHUNK)


@triton.jit
def _chunk(query_start_loc, num_requests):
    """The request of a program's chunk, the request's first token, its tokens, and the chunk's first among them."""
    place = tl.program_id(0)
    request = range_of(place, query_start_loc, num_requests, CHUNK)
    begin = tl.load(query_start_loc + request)
    tokens = tl.load(query_start_loc + request + 1) - begin
    return request.to(tl.int64), begin.to(tl.int64), tokens, (place - (begin // CHUNK + request)) * CHUNK


@triton.jit
def _convolved(
    weight, conv, x, first, channel, known, used, tokens, stride_x, stride_row, stride_channel, W: tl.constexpr
):  # fmt: skip
    """The convolution and silu of some channels of a chunk, ``[CHUNK, channels]``; zeros behind the last of both.

    ``conv``, ``x``: rows of the request's first input in the cache and of its first new token.
    """
    place = tl.arange(0, CHUNK)
    row = first + place
    chunk = x + tl.cast(first, tl.int64) * stride_x
    mixed = tl.zeros([CHUNK, channel.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        factor = tl.load(weight + channel * W + tap, mask=used, other=0.0).to(tl.float32)
        token = (row + (tap - (W - 1)))[:, None]
        new = tl.load(
            chunk + (place + (tap - (W - 1)))[:, None] * stride_x + channel[None, :],
            mask=(token >= 0) & (token < tokens) & used[None, :],
            other=0.0,
        )
        mixed += new.to(tl.float32) * factor[None, :]
    if first == 0:
        for early in tl.static_range(W - 1):
            cached_factor = tl.load(weight + channel * W + early, mask=used, other=0.0).to(tl.float32)
            at = (row + early)[:, None]
            cached = tl.load(
                conv + at * stride_row + channel.to(tl.int64)[None, :] * stride_channel,
                mask=(at < W - 1) & known[None, :],
                other=0.0,
            )
            mixed += cached.to(tl.float32) * cached_factor[None, :]
    return tl.where((row < tokens)[:, None], silu(mixed), 0.0)


@triton.jit
def _decays(total):
    """``exp(G_i - G_j)`` for ``j <= i``, and zeros."""
    row = tl.arange(0, CHUNK)
    lower = row[:, None] >= row[None, :]
    # Only differences that are not positive are exponentiated: the others may overflow.
    return tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def _inverse(system, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """``(1 + system)^-1`` of a strictly lower triangular matrix: of its blocks of 2 on the diagonal, then 4, up to all.

    ``[[X, 0], [B, Y]]^-1 = [[X^-1, 0], [-Y^-1 B X^-1, Y^-1]]``: with the inverse blocks in ``D``, it is ``D - D B D``.
    All numbers of the inverses are at most 1, as each is a product of contractions between two keys.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    for level in range(1, 6):
        apart = (row >> level) != (column >> level)
        together = (row >> (level + 1)) == (column >> (level + 1))
        between = tl.where(apart & together, system, 0.0)
        part = tl.dot(inverse.to(DTYPE), between.to(DTYPE), input_precision=PRECISION)
        inverse -= tl.dot(part.to(DTYPE), inverse.to(DTYPE), input_precision=PRECISION)
    return inverse


@triton.jit
def _tile(
    tensor, place, head, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAKEN: tl.constexpr = None
):  # fmt: skip
    """Where the elements of a head's tile ``[ROWS, COLUMNS]`` lie, or those of its first ``TAKEN`` rows."""
    NUM: tl.constexpr = ROWS if TAKEN is None else TAKEN
    row = tl.arange(0, NUM)[:, None]
    tile = tensor + (tl.cast(place, tl.int64) * HEADS + head) * (ROWS * COLUMNS)
    return tile + row * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _row(totals, place, head, HEADS: tl.constexpr):
    """Where a head's ``G`` lies."""
    return totals + (tl.cast(place, tl.int64) * HEADS + head) * CHUNK + tl.arange(0, CHUNK)


@entry_kernel
@triton.jit(do_not_specialize=["num_requests", "stride_slots"])
def mix(
    qkvz, conv_weight, conv, query_start_loc, slots, seq_lens, num_accepted, block_size, mixed, num_requests,
    stride_x, stride_conv_slot, stride_conv_row, stride_conv_channel, stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, W: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The queries, the keys or the values of one chunk and head: convolved, the first two normed, queries scaled."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, begin, tokens, first = _chunk(query_start_loc, num_requests)
    slot, _, has, cached, _at = located(slots, seq_lens, num_accepted, block_size, request, tokens, stride_slots)
    if (first >= tokens) | (slot <= 0):
        return
    head = tl.program_id(1)  # queries of all heads, then keys, then values, as their channels
    dims = tl.where(head < 2 * HK, K, V)
    channel = tl.where(head < 2 * HK, head * K, 2 * HK * K + (head - 2 * HK) * V)
    dim = tl.arange(0, PADDED)
    window = conv + slot * stride_conv_slot + cached * stride_conv_row
    values = _convolved(
        conv_weight, window, qkvz + begin * stride_x, first, channel + dim, dim < has * dims, dim < dims, tokens,
        stride_x, stride_conv_row, stride_conv_channel, W,
    )  # fmt: skip
    if head < 2 * HK:
        factor = tl.rsqrt(tl.sum(values * values, 1) + L2_EPS)
        factor *= tl.where(head < HK, K**-0.5, 1.0)
        values *= factor[:, None]
    tl.store(_tile(mixed, tl.program_id(0), head, 2 * HK + HV, CHUNK, PADDED), values.to(mixed.dtype.element_ty))


@entry_kernel
@triton.jit(do_not_specialize=["num_requests", "stride_slots"], do_not_specialize_on_alignment=["ba"])
def solve(
    ba, a_log, dt_bias, query_start_loc, slots, seq_lens, block_size, mixed, w, u, totals, num_requests, stride_ba,
    stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, PADDED: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``w``, ``u`` and ``totals`` of one chunk of a value head."""
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    HEADS: tl.constexpr = 2 * HK + HV
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, begin, tokens, first = _chunk(query_start_loc, num_requests)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + request)
    if (first >= tokens) | (tl.load(own_slot(slots, seq_len, block_size, request, stride_slots)) <= 0):
        return

    place = tl.program_id(0)
    token = tl.arange(0, CHUNK)
    used = first + token < tokens
    ba += (begin + first) * stride_ba + head
    b = tl.load(ba + token * stride_ba, mask=used, other=0.0).to(tl.float32)
    a = tl.load(ba + token * stride_ba + HV, mask=used, other=0.0).to(tl.float32)
    key = tl.load(_tile(mixed, place, HK + head // (HV // HK), HEADS, CHUNK, PADDED))
    value = tl.load(_tile(mixed, place, 2 * HK + head, HEADS, CHUNK, PADDED))
    g, beta = gates(a, b, tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
    beta = tl.where(used, beta, 0.0)
    total = tl.cumsum(tl.where(used, g, 0.0), 0)
    tl.store(_row(totals, place, head, HV), total)
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    system = tl.where(token[:, None] > token[None, :], beta[:, None] * products * _decays(total), 0.0)
    inverse = _inverse(system, INVERSE, PRECISION)
    taken = tl.dot((inverse * (beta * tl.exp(total))[None, :]).to(DTYPE), key, input_precision=PRECISION)
    tl.store(_tile(w, place, head, HV, CHUNK, PADDED), taken.to(DTYPE))
    added = tl.dot((inverse * beta[None, :]).to(DTYPE), value, input_precision=PRECISION)
    tl.store(_tile(u, place, head, HV, PADDED, CHUNK), tl.trans(added.to(DTYPE)))


@triton.jit
def _step(
    state, mixed, w, u, totals, place, head, first_row,
    HK: tl.constexpr, HV: tl.constexpr, PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of a chunk's ``u``, where they lie, the chunk's keys and ``G``."""
    at = _tile(u + first_row * CHUNK, place, head, HV, PADDED, CHUNK, BLOCK_V)
    taken = tl.load(_tile(w, place, head, HV, CHUNK, PADDED))
    added = tl.load(at).to(tl.float32)
    key = tl.load(_tile(mixed, place, HK + head // (HV // HK), 2 * HK + HV, CHUNK, PADDED))
    total = tl.load(_row(totals, place, head, HV))
    added -= tl.dot(state.to(taken.dtype), tl.trans(taken), input_precision=PRECISION)
    return added, at, key, total


@triton.jit
def _advanced(state, added, key, left, last, PRECISION: tl.constexpr):
    """The state after tokens of which ``left`` is left, each; ``last`` is left of the state before."""
    return tl.dot((added * left[None, :]).to(key.dtype), key, state * last, input_precision=PRECISION)


@triton.jit
def _chunks(
    state, states, mixed, w, u, totals, place, end, head, first_row,
    HK: tl.constexpr, HV: tl.constexpr, PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the chunks at ``place .. end - 1``; writes the states before them, and their ``u``."""
    for at in range(place, end):
        before = _tile(states + first_row * PADDED, at, head, HV, PADDED, PADDED, BLOCK_V)
        tl.store(before, state.to(states.dtype.element_ty))
        added, u_at, key, total = _step(
            state, mixed, w, u, totals, at, head, first_row, HK, HV, PADDED, BLOCK_V, PRECISION
        )
        tl.store(u_at, added.to(u.dtype.element_ty))
        # Behind the last token G stays as it is, and u is zero.
        last = tl.load(totals + (tl.cast(at, tl.int64) * HV + head) * CHUNK + (CHUNK - 1))
        state = _advanced(state, added, key, tl.exp(last - total), tl.exp(last), PRECISION)
    return state


@triton.jit
def _keep_inputs(
    conv, window, x, count, channel, known, used, tokens, stride_x, stride_row, stride_channel,
    W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the inputs of some channels behind which ``count`` new tokens lie to a slot's first rows."""
    row = tl.arange(0, ROWS)
    inputs = seen(window, x, count + row, channel, known, used, tokens, stride_x, stride_row, stride_channel, W)
    tl.debug_barrier()  # they may move up in place, and several threads have loaded what one stores
    at = conv + row[:, None] * stride_row + channel.to(tl.int64)[None, :] * stride_channel
    tl.store(at, inputs.to(conv.dtype.element_ty), mask=(row < W - 1)[:, None] & used[None, :])


@entry_kernel
@triton.jit(do_not_specialize=["stride_slots"])
def carry(
    qkvz, conv, recurrent, query_start_loc, slots, seq_lens, num_accepted, block_size, snapshot_slots, snapshot_tokens,
    mixed, w, u, totals, states, stride_x,
    stride_conv_slot, stride_conv_row, stride_conv_channel, stride_state, stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_V: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows of a value head's state through all chunks of a request; then the convolution's inputs.

    ``states``: those before each chunk. ``u`` has ``u - w S^T`` afterwards.
    """
    SHARED: tl.constexpr = HV // HK
    SNAPSHOTS: tl.constexpr = snapshot_slots is not None  # the branches on it are made by the compiler
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start_loc + request)
    tokens = tl.load(query_start_loc + request + 1) - begin
    slot, source, has, cached, _at = located(slots, seq_lens, num_accepted, block_size, request, tokens, stride_slots)
    if (tokens == 0) | (slot <= 0):
        return
    place = begin // CHUNK + tl.program_id(2)
    end = place + tl.cdiv(tokens, CHUNK)
    dim = tl.arange(0, PADDED)
    first_row = tl.program_id(0) * BLOCK_V
    column = first_row + tl.arange(0, BLOCK_V)
    mask = (column < V)[:, None] & (dim < K)[None, :]
    within = head * (V * K) + column[:, None] * K + dim[None, :]
    known = (column < V)[:, None] & (dim < has * K)[None, :]
    state = tl.load(recurrent + source * stride_state + within, mask=known, other=0.0).to(tl.float32)
    if SNAPSHOTS:
        kept = tl.load(snapshot_tokens + request)
        kept_slot = tl.load(snapshot_slots + request).to(tl.int64)
        kept = tl.where(kept_slot > 0, kept, 0)
        whole = place + kept // CHUNK
        state = _chunks(
            state, states, mixed, w, u, totals, place, whole, head, first_row, HK, HV, PADDED, BLOCK_V, PRECISION
        )
        place = whole
        if kept > 0:
            copy = state
            if kept % CHUNK != 0:  # within a chunk, which is gone through once more below
                added, _, key, total = _step(
                    state, mixed, w, u, totals, whole, head, first_row, HK, HV, PADDED, BLOCK_V, PRECISION
                )
                counted = tl.arange(0, CHUNK) < kept % CHUNK
                last = tl.load(totals + (tl.cast(whole, tl.int64) * HV + head) * CHUNK + (kept % CHUNK - 1))
                left = tl.where(counted, tl.exp(tl.where(counted, last - total, 0.0)), 0.0)
                copy = _advanced(state, added, key, left, tl.exp(last), PRECISION)
            tl.store(recurrent + kept_slot * stride_state + within, copy.to(recurrent.dtype.element_ty), mask=mask)
    state = _chunks(state, states, mixed, w, u, totals, place, end, head, first_row, HK, HV, PADDED, BLOCK_V, PRECISION)
    tl.store(recurrent + slot * stride_state + within, state.to(recurrent.dtype.element_ty), mask=mask)

    window = conv + slot * stride_conv_slot + cached * stride_conv_row
    own = conv + slot * stride_conv_slot
    x = qkvz + tl.cast(begin, tl.int64) * stride_x
    channel = 2 * HK * K + head * V + column
    v_known = column < has * V
    if SNAPSHOTS:  # noqa: SIM102
        if kept > 0:
            copied = conv + kept_slot * stride_conv_slot
            _keep_inputs(
                copied, window, x, kept, channel, v_known, column < V, tokens, stride_x, stride_conv_row,
                stride_conv_channel, W, ROWS,
            )  # fmt: skip
    _keep_inputs(
        own, window, x, tokens, channel, v_known, column < V, tokens, stride_x, stride_conv_row,
        stride_conv_channel, W, ROWS,
    )  # fmt: skip
    # Queries' and keys' channels: those of one key head by one program.
    if (tl.program_id(0) == 0) & (head % SHARED == 0):
        for side in tl.static_range(2):
            shared_channel = (side * HK + head // SHARED) * K + dim
            if SNAPSHOTS:  # noqa: SIM102
                if kept > 0:
                    copied = conv + kept_slot * stride_conv_slot
                    _keep_inputs(
                        copied, window, x, kept, shared_channel, dim < has * K, dim < K, tokens, stride_x,
                        stride_conv_row, stride_conv_channel, W, ROWS,
                    )  # fmt: skip
            _keep_inputs(
                own, window, x, tokens, shared_channel, dim < has * K, dim < K, tokens, stride_x,
                stride_conv_row, stride_conv_channel, W, ROWS,
            )  # fmt: skip


@entry_kernel
@triton.jit(do_not_specialize=["num_requests", "stride_slots"])
def answer(
    qkvz, norm_weight, out, query_start_loc, slots, seq_lens, block_size, mixed, u, totals, states, num_requests, eps,
    stride_x, stride_out, stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk of a value head, after the gated norm."""
    C: tl.constexpr = 2 * HK * K + HV * V
    HEADS: tl.constexpr = 2 * HK + HV
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, begin, tokens, first = _chunk(query_start_loc, num_requests)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + request)
    if (first >= tokens) | (tl.load(own_slot(slots, seq_len, block_size, request, stride_slots)) <= 0):
        return
    place = tl.program_id(0)
    query = tl.load(_tile(mixed, place, head // (HV // HK), HEADS, CHUNK, PADDED))
    key = tl.load(_tile(mixed, place, HK + head // (HV // HK), HEADS, CHUNK, PADDED))
    state = tl.load(_tile(states, place, head, HV, PADDED, PADDED))
    added = tl.load(_tile(u, place, head, HV, PADDED, CHUNK))
    total = tl.load(_row(totals, place, head, HV))
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * _decays(total)
    value = tl.dot(query, tl.trans(state), input_precision=PRECISION) * tl.exp(total)[:, None]
    value = tl.dot(scores.to(added.dtype), tl.trans(added), value, input_precision=PRECISION)
    token = tl.arange(0, CHUNK)
    column = tl.arange(0, PADDED)
    mask = (first + token < tokens)[:, None] & (column < V)[None, :]
    qkvz += (begin + first) * stride_x + (C + head * V)
    z = tl.load(qkvz + token[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=column < V, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / V + eps)[:, None]
    y = value * factor * weight[None, :] * silu(z)
    out += (begin + first) * stride_out + head * V
    at = out + token[:, None] * stride_out + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=mask, eviction_policy=EVICT_LAST)
