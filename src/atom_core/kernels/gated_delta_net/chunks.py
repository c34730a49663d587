"""Gated DeltaNet of prompts in Triton, in chunks of 64 tokens (arXiv 2412.06464, section 3.3): four kernels.

:func:`mix` makes queries and keys. With ``G`` the sum of ``g`` from a chunk's first token to each token,

    A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i;   T = (1 + A)^-1
    u = T (beta v);   w = T (beta exp(G) k)                                         :func:`solve`, any order of chunks
    u -= w S^T;   S = exp(G_last) S + sum_i exp(G_last - G_i) u_i k_i^T              :func:`carry`, chunk after chunk
    o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) u_j               :func:`answer`, any order of chunks

where ``S`` is the state before the chunk. A chunk belongs to one request: request ``r``, which begins at token ``t``,
has the places from ``t // 64 + r`` on, so a program finds its chunk without the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.attention.triton_kernel import range_of
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_delta_net.reference import CHUNK as _CHUNK
from atom_core.kernels.gated_delta_net.triton_parts import L2_EPS, gates, located, seen, silu

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
    """The convolution and silu of some channels of a chunk, ``[CHUNK, channels]``; zeros behind the last token.

    ``conv``, ``x``: rows of the request's first input in the cache and of its first new token.
    """
    row = first + tl.arange(0, CHUNK)
    mixed = tl.zeros([CHUNK, channel.shape[0]], tl.float32)
    for tap in tl.range(W, num_stages=1):  # loads of all taps at once would have no registers
        factor = tl.load(weight + channel * W + tap, mask=used, other=0.0).to(tl.float32)
        token = (row + (tap - (W - 1)))[:, None]
        new = tl.load(
            x + token.to(tl.int64) * stride_x + channel[None, :],
            mask=(token >= 0) & (token < tokens) & used[None, :],
            other=0.0,
        )
        mixed += new.to(tl.float32) * factor[None, :]
    if first == 0:
        for early in tl.static_range(W - 1):
            cached_factor = tl.load(weight + channel * W + early, mask=used, other=0.0).to(tl.float32)
            place = (row + early)[:, None]
            cached = tl.load(
                conv + place * stride_row + channel.to(tl.int64)[None, :] * stride_channel,
                mask=(place < W - 1) & known[None, :],
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


@triton.jit(do_not_specialize=["num_requests"])
def mix(
    qkvz, conv_weight, conv, query_start_loc, slots, has_state, num_accepted, queries, keys, num_requests, stride_x,
    stride_conv_slot, stride_conv_row, stride_conv_channel, stride_slots,
    HK: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The queries or the keys of one chunk of a key head: convolved, normed, and queries scaled; ``[T, HK, K]``."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, begin, tokens, first = _chunk(query_start_loc, num_requests)
    slot, _, has, cached = located(slots, has_state, num_accepted, request, stride_slots)
    if (first >= tokens) | (slot <= 0):
        return
    side = tl.program_id(1)  # queries of all heads, then keys, as their channels
    dim = tl.arange(0, K_PADDED)
    used = dim < K
    window = conv + slot * stride_conv_slot + cached * stride_conv_row
    mixed = _convolved(
        conv_weight, window, qkvz + begin * stride_x, first, side * K + dim, dim < has * K, used, tokens,
        stride_x, stride_conv_row, stride_conv_channel, W,
    )  # fmt: skip
    factor = tl.rsqrt(tl.sum(mixed * mixed, 1) + L2_EPS)
    target = keys
    head = side - HK
    if side < HK:
        target = queries
        head = side
        factor *= K**-0.5
    row = first + tl.arange(0, CHUNK)
    at = target + ((begin + row) * HK + head)[:, None] * K + dim[None, :]
    tl.store(at, (mixed * factor[:, None]).to(keys.dtype.element_ty), mask=(row < tokens)[:, None] & used[None, :])


@triton.jit(do_not_specialize=["num_requests", "num_tokens"], do_not_specialize_on_alignment=["ba"])
def solve(
    qkvz, ba, conv_weight, a_log, dt_bias, conv, query_start_loc, slots, has_state, num_accepted,
    keys, w, u, totals, num_requests, num_tokens, stride_x, stride_ba,
    stride_conv_slot, stride_conv_row, stride_conv_channel, stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, V: tl.constexpr,
    V_PADDED: tl.constexpr, W: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One chunk of a value head: ``w [T, HV, K]``, ``u [T, HV, V]`` and ``totals``: ``G``, float32 ``[HV, T]``."""
    DTYPE: tl.constexpr = keys.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, begin, tokens, first = _chunk(query_start_loc, num_requests)
    head = tl.program_id(1)
    slot, _, has, cached = located(slots, has_state, num_accepted, request, stride_slots)
    if (first >= tokens) | (slot <= 0):
        return

    dim = tl.arange(0, K_PADDED)
    place = tl.arange(0, CHUNK)
    row = first + place
    row_used = row < tokens
    at = begin + row
    b = tl.load(ba + at * stride_ba + head, mask=row_used, other=0.0).to(tl.float32)
    a = tl.load(ba + at * stride_ba + HV + head, mask=row_used, other=0.0).to(tl.float32)
    g, beta = gates(a, b, tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
    beta = tl.where(row_used, beta, 0.0)
    total = tl.cumsum(tl.where(row_used, g, 0.0), 0)
    tl.store(totals + head * tl.cast(num_tokens, tl.int64) + at, total, mask=row_used)
    key_mask = row_used[:, None] & (dim < K)[None, :]
    key = tl.load(keys + (at * HK + head // (HV // HK))[:, None] * K + dim[None, :], mask=key_mask, other=0.0)
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    system = tl.where(place[:, None] > place[None, :], beta[:, None] * products * _decays(total), 0.0)
    inverse = _inverse(system, INVERSE, PRECISION)
    taken = tl.dot((inverse * (beta * tl.exp(total))[None, :]).to(DTYPE), key, input_precision=PRECISION)
    tl.store(w + (at * HV + head)[:, None] * K + dim[None, :], taken.to(DTYPE), mask=key_mask)

    column = tl.arange(0, V_PADDED)
    column_used = column < V
    window = conv + slot * stride_conv_slot + cached * stride_conv_row
    value = _convolved(
        conv_weight, window, qkvz + begin * stride_x, first, 2 * HK * K + head * V + column, column < has * V,
        column_used, tokens, stride_x, stride_conv_row, stride_conv_channel, W,
    )  # fmt: skip
    added = tl.dot((inverse * beta[None, :]).to(DTYPE), value.to(DTYPE), input_precision=PRECISION)
    value_at = (at * HV + head)[:, None] * V + column[None, :]
    tl.store(u + value_at, added.to(DTYPE), mask=row_used[:, None] & column_used[None, :])


@triton.jit
def _step(
    state, w, u, keys, totals, begin, tokens, chunk, head, dim, column, num_tokens,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's ``u``, its keys and ``G``."""
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    used = row < tokens
    at = begin + row
    value_at = (at * HV + head)[:, None] * V + column[None, :]
    value_mask = used[:, None] & (column < V)[None, :]
    key_mask = used[:, None] & (dim < K)[None, :]
    taken = tl.load(w + (at * HV + head)[:, None] * K + dim[None, :], mask=key_mask, other=0.0)
    added = tl.load(u + value_at, mask=value_mask, other=0.0)
    key = tl.load(keys + (at * HK + head // (HV // HK))[:, None] * K + dim[None, :], mask=key_mask, other=0.0)
    total = tl.load(totals + head * tl.cast(num_tokens, tl.int64) + at, mask=used, other=0.0)
    added = added.to(tl.float32) - tl.dot(taken, state.to(taken.dtype), input_precision=PRECISION)
    return added, key, total, used, value_at, value_mask


@triton.jit
def _advanced(state, added, key, total, counted, last, PRECISION: tl.constexpr):
    """The state after the tokens that are counted, of which the last has ``G = last``."""
    left = tl.where(counted, tl.exp(tl.where(counted, last - total, 0.0)), 0.0)
    new = tl.dot(tl.trans(key), (added * left[:, None]).to(key.dtype), input_precision=PRECISION)
    return state * tl.exp(last) + new


@triton.jit
def _chunks(
    state, states, w, u, keys, totals, begin, tokens, place, first, end, head, dim, column, num_tokens,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after chunks ``first .. end - 1``; writes the states before them, and their ``u``."""
    mask = (dim < K)[:, None] & (column < V)[None, :]
    for chunk in range(first, end):
        before = states + ((place + chunk) * HV + head) * (K * V) + dim[:, None] * V + column[None, :]
        tl.store(before, state.to(states.dtype.element_ty), mask=mask)
        added, key, total, used, value_at, value_mask = _step(
            state, w, u, keys, totals, begin, tokens, chunk, head, dim, column, num_tokens, HK, HV, K, V, PRECISION
        )
        tl.store(u + value_at, added.to(u.dtype.element_ty), mask=value_mask)
        newest = tl.minimum(chunk * CHUNK + CHUNK, tokens) - 1
        last = tl.load(totals + head * tl.cast(num_tokens, tl.int64) + begin + newest)
        state = _advanced(state, added, key, total, used, last, PRECISION)
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


@triton.jit(do_not_specialize=["num_tokens"])
def carry(
    qkvz, conv, recurrent, query_start_loc, slots, has_state, num_accepted, snapshot_slots, snapshot_tokens,
    keys, w, u, totals, states, num_tokens, stride_x,
    stride_conv_slot, stride_conv_row, stride_conv_channel, stride_state, stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows of a value head's state through all chunks of a request; then the convolution's inputs.

    ``states``: those before each chunk, ``[places, HV, K, V]``. ``u`` has ``u - w S^T`` afterwards.
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
    slot, source, has, cached = located(slots, has_state, num_accepted, request, stride_slots)
    if (tokens == 0) | (slot <= 0):
        return
    place = (begin // CHUNK).to(tl.int64) + request
    begin = begin.to(tl.int64)
    dim = tl.arange(0, K_PADDED)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (dim < K)[:, None] & (column < V)[None, :]
    within = head * (V * K) + column[None, :] * K + dim[:, None]
    known = (dim < has * K)[:, None] & (column < V)[None, :]
    state = tl.load(recurrent + source * stride_state + within, mask=known, other=0.0).to(tl.float32)
    num_chunks = tl.cdiv(tokens, CHUNK)
    done = 0
    if SNAPSHOTS:
        kept = tl.load(snapshot_tokens + request)
        kept_slot = tl.load(snapshot_slots + request).to(tl.int64)
        kept = tl.where(kept_slot > 0, kept, 0)
        done = kept // CHUNK
        state = _chunks(
            state, states, w, u, keys, totals, begin, tokens, place, 0, done, head, dim, column, num_tokens,
            HK, HV, K, V, PRECISION,
        )  # fmt: skip
        if kept > 0:
            copy = state
            if kept % CHUNK != 0:  # within a chunk, which is gone through once more below
                added, key, total, _, _, _ = _step(
                    state, w, u, keys, totals, begin, tokens, done, head, dim, column, num_tokens,
                    HK, HV, K, V, PRECISION,
                )  # fmt: skip
                last = tl.load(totals + head * tl.cast(num_tokens, tl.int64) + begin + kept - 1)
                counted = done * CHUNK + tl.arange(0, CHUNK) < kept
                copy = _advanced(state, added, key, total, counted, last, PRECISION)
            tl.store(recurrent + kept_slot * stride_state + within, copy.to(recurrent.dtype.element_ty), mask=mask)
    state = _chunks(
        state, states, w, u, keys, totals, begin, tokens, place, done, num_chunks, head, dim, column, num_tokens,
        HK, HV, K, V, PRECISION,
    )  # fmt: skip
    tl.store(recurrent + slot * stride_state + within, state.to(recurrent.dtype.element_ty), mask=mask)

    window = conv + slot * stride_conv_slot + cached * stride_conv_row
    own = conv + slot * stride_conv_slot
    x = qkvz + begin * stride_x
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


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def answer(
    qkvz, norm_weight, out, query_start_loc, slots, queries, keys, u, totals, states, num_requests, num_tokens, eps,
    stride_x, stride_out, stride_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, V: tl.constexpr,
    V_PADDED: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk of a value head, after the gated norm."""
    C: tl.constexpr = 2 * HK * K + HV * V
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, begin, tokens, first = _chunk(query_start_loc, num_requests)
    head = tl.program_id(1)
    if (first >= tokens) | (tl.load(slots + request * stride_slots) <= 0):
        return
    dim = tl.arange(0, K_PADDED)
    column = tl.arange(0, V_PADDED)
    row = first + tl.arange(0, CHUNK)
    used = row < tokens
    at = begin + row
    key_at = (at * HK + head // (HV // HK))[:, None] * K + dim[None, :]
    key_mask = used[:, None] & (dim < K)[None, :]
    value_mask = used[:, None] & (column < V)[None, :]
    query = tl.load(queries + key_at, mask=key_mask, other=0.0)
    key = tl.load(keys + key_at, mask=key_mask, other=0.0)
    before = states + (tl.program_id(0).to(tl.int64) * HV + head) * (K * V) + dim[:, None] * V + column[None, :]
    state = tl.load(before, mask=(dim < K)[:, None] & (column < V)[None, :], other=0.0)
    added = tl.load(u + (at * HV + head)[:, None] * V + column[None, :], mask=value_mask, other=0.0)
    total = tl.load(totals + head * tl.cast(num_tokens, tl.int64) + at, mask=used, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * _decays(total)
    value = tl.dot(query, state, input_precision=PRECISION) * tl.exp(total)[:, None]
    value = tl.dot(scores.to(added.dtype), added, value, input_precision=PRECISION)
    z = tl.load(qkvz + at[:, None] * stride_x + (C + head * V) + column[None, :], mask=value_mask, other=0.0).to(
        tl.float32
    )
    weight = tl.load(norm_weight + column, mask=column < V, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / V + eps)[:, None]
    y = value * factor * weight[None, :] * silu(z)
    tl.store(
        out + at[:, None] * stride_out + head * V + column[None, :],
        y.to(out.dtype.element_ty),
        mask=value_mask,
        eviction_policy=EVICT_LAST,
    )
