"""Gated DeltaNet of few new tokens a request in Triton: one launch, from the projections to the gated norm.

A program is one warp. It takes a request and some rows of a value head's state, which stay in its registers: they are
read once, and written once, or after each token that is verified. Many such programs hide each other's waits.

Two things need all programs of a key head: the gated norm is over a value head's rows, and the inputs of queries and
keys move up in place, which all of these programs read. So each counts that it has read the inputs and stored its
values, and the last one does both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch, BatchShape, capturing
from atom_core.cache import StateView
from atom_core.kernels.attention.triton_kernel import is_last
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_delta_net.hopper import HopperGatedDeltaDecode
from atom_core.kernels.gated_delta_net.triton_parts import assert_layout, gates, located, normed, silu
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2, takes_amd_assembly

if TYPE_CHECKING:
    from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec

#: The most new tokens of a request: a program takes them one by one.
MAX_TOKENS = 8
#: Rows of a state that a program has in its registers; and where programs are few.
_ROWS, _FEW_ROWS = 32, 8
#: Programs up to which they are few.
_FEW = 128


@triton.jit
def _taps(weight, channel, used, W: tl.constexpr):
    """A convolution's weights of the third, second and first token before, and of the token itself."""
    at = weight + channel * W
    oldest = tl.zeros(channel.shape, tl.float32)
    older = oldest
    if W > 3:
        oldest = tl.load(at + (W - 4), mask=used, other=0.0).to(tl.float32)
    if W > 2:
        older = tl.load(at + (W - 3), mask=used, other=0.0).to(tl.float32)
    before = tl.load(at + (W - 2), mask=used, other=0.0).to(tl.float32)
    return oldest, older, before, tl.load(at + (W - 1), mask=used, other=0.0).to(tl.float32)


@triton.jit
def _inputs(conv, channel, used, stride_row, stride_channel, W: tl.constexpr):
    """The inputs of the third, second and first token before; ``conv``: the first of their rows."""
    at = conv + channel.to(tl.int64) * stride_channel
    oldest = tl.zeros(channel.shape, tl.float32)
    older = oldest
    if W > 3:
        oldest = tl.load(at + (W - 4) * stride_row, mask=used, other=0.0).to(tl.float32)
    if W > 2:
        older = tl.load(at + (W - 3) * stride_row, mask=used, other=0.0).to(tl.float32)
    return oldest, older, tl.load(at + (W - 2) * stride_row, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _keep(conv, channel, used, oldest, older, before, stride_row, stride_channel, W: tl.constexpr):
    """Write the last inputs to the rows from ``conv`` on."""
    at = conv + channel.to(tl.int64) * stride_channel
    dtype: tl.constexpr = conv.dtype.element_ty
    if W > 3:
        tl.store(at + (W - 4) * stride_row, oldest.to(dtype), mask=used)
    if W > 2:
        tl.store(at + (W - 3) * stride_row, older.to(dtype), mask=used)
    tl.store(at + (W - 2) * stride_row, before.to(dtype), mask=used)


@triton.jit
def _keep_all(
    own, drafts, copy, x, channel, used, oldest, older, before, last3, last2, last1, kept, verified, tokens,
    stride_x, drafts_row, drafts_channel, stride_row, stride_channel,
    W: tl.constexpr, SNAPSHOTS: tl.constexpr, VERIFIES: tl.constexpr,
):  # fmt: skip
    """Write all that is kept of some channels' inputs.

    ``own``, ``drafts``, ``copy``: the first rows of the slot, of where inputs of tokens to verify go, and of a copy's
    slot; ``x``: the first new token's row. The inputs before the new tokens are given, and the last ones.
    """
    if SNAPSHOTS:  # noqa: SIM102 - constexpr, unlike the next
        if kept > 0:
            copied3 = oldest
            copied2 = older
            copied1 = before
            for token in range(kept):
                copied3 = copied2
                copied2 = copied1
                copied1 = tl.load(x + token * stride_x + channel, mask=used, other=0.0).to(tl.float32)
            _keep(copy, channel, used, copied3, copied2, copied1, stride_row, stride_channel, W)
    alone = True
    if VERIFIES:
        if verified != 0:
            at = drafts + channel.to(tl.int64) * drafts_channel
            if W > 3:
                tl.store(at, older.to(drafts.dtype.element_ty), mask=used)
            if W > 2:
                tl.store(at + (W - 3) * drafts_row, before.to(drafts.dtype.element_ty), mask=used)
            for token in range(tokens):
                new = tl.load(x + token * stride_x + channel, mask=used, other=0.0).to(drafts.dtype.element_ty)
                tl.store(at + (W - 2 + token) * drafts_row, new, mask=used)
        alone = verified == 0
    if alone:
        _keep(own, channel, used, last3, last2, last1, stride_row, stride_channel, W)


@triton.jit
def _store_state(at, state, used):
    """Store a state of three dimensions to where it was loaded from in two."""
    tl.store(at, tl.reshape(state, at.shape).to(at.dtype.element_ty), mask=used)


# The rows of `ba` may be short, and begin anywhere in mixed steps. Slots may be a view of a framework's table.
@entry_kernel
@triton.jit(do_not_specialize=["stride_slots"], do_not_specialize_on_alignment=["ba"])
def _gated_delta_decode(
    qkvz,
    ba,
    out,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    conv,
    recurrent,
    unverified_conv,
    unverified,
    query_start_loc,
    slots,
    seq_lens,
    num_accepted,
    block_size,
    verifies,
    snapshot_slots,
    snapshot_tokens,
    arrivals,
    eps,
    stride_x,
    stride_ba,
    stride_out,
    stride_conv_slot,
    stride_conv_row,
    stride_conv_channel,
    stride_state,
    stride_slots,
    stride_unverified_conv,
    stride_unverified_row,
    stride_unverified_channel,
    stride_unverified,
    stride_unverified_token,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_PADDED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    SINGLE: tl.constexpr,
    OVERLAP: tl.constexpr,
    AMD: tl.constexpr,
):
    SHARED: tl.constexpr = HV // HK
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    SNAPSHOTS: tl.constexpr = snapshot_slots is not None
    VERIFIES: tl.constexpr = verifies is not None
    SEPARATE: tl.constexpr = unverified is not None
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS
    request = tl.program_id(1).to(tl.int64)
    key_head = head // SHARED
    begin = tl.load(query_start_loc + request).to(tl.int64)
    tokens = (tl.load(query_start_loc + request + 1) - begin).to(tl.int32)
    slot, source, has, first, own_slots = located(
        slots, seq_lens, num_accepted, block_size, request, tokens, stride_slots
    )
    kept = 0
    if SNAPSHOTS:
        kept = tl.load(snapshot_tokens + request)
        kept_slot = tl.load(snapshot_slots + request).to(tl.int64)
        kept = tl.where(kept_slot > 0, kept, 0)
    verified = 0
    if VERIFIES:
        verified = tl.load(verifies + request).to(tl.int32)
    if (tokens == 0) | (slot <= 0):
        # One idle program still waits, so that a wait for this kernel is also a wait for the kernels before it.
        if OVERLAP and tl.program_id(0) + tl.program_id(1) == 0:
            tl.extra.cuda.gdc_wait()
        return

    # A part of a row's keys lies with eight threads, and so do the row's other parts: few threads add up. Triton 3.6
    # loads tensors of three dimensions in another layout than 3.9, with ten times the shuffles; of two in the same.
    row = block * BLOCK_V + tl.arange(0, BLOCK_V)
    row_used = row < V
    part = tl.arange(0, GROUPS * BLOCK_V)
    key = (part // BLOCK_V * INNER)[:, None] + tl.arange(0, INNER)[None, :]
    of_row = (block * BLOCK_V + part % BLOCK_V)[:, None]
    state_at = head * (V * K) + of_row * K + key
    state_used = (key < K) & (of_row < V)
    state_known = (key < has * K) & (of_row < V)  # none, if it has no state
    state = tl.load(recurrent + source * stride_state + state_at, mask=state_known, other=0.0).to(tl.float32)
    state = tl.reshape(state, (GROUPS, BLOCK_V, INNER))

    dim = tl.arange(0, GROUPS * INNER)
    dim_used = dim < K
    q_channel = key_head * K + dim
    k_channel = (HK + key_head) * K + dim
    v_channel = 2 * HK * K + head * V + row
    window = conv + slot * stride_conv_slot + first * stride_conv_row
    q3, q2, q1 = _inputs(window, q_channel, dim < has * K, stride_conv_row, stride_conv_channel, W)
    k3, k2, k1 = _inputs(window, k_channel, dim < has * K, stride_conv_row, stride_conv_channel, W)
    v3, v2, v1 = _inputs(window, v_channel, row < has * V, stride_conv_row, stride_conv_channel, W)
    q_w3, q_w2, q_w1, q_w0 = _taps(conv_weight, q_channel, dim_used, W)
    k_w3, k_w2, k_w1, k_w0 = _taps(conv_weight, k_channel, dim_used, W)
    v_w3, v_w2, v_w1, v_w0 = _taps(conv_weight, v_channel, row_used, W)
    log_rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    x = qkvz + begin * stride_x
    b_at = ba + begin * stride_ba + head
    out += begin * stride_out
    q_oldest, q_older, q_old = q3, q2, q1
    k_oldest, k_older, k_old = k3, k2, k1
    v_oldest, v_older, v_old = v3, v2, v1
    for token in range(1 if SINGLE else tokens):
        given = x + token * stride_x
        q = tl.load(given + q_channel, mask=dim_used, other=0.0).to(tl.float32)
        k = tl.load(given + k_channel, mask=dim_used, other=0.0).to(tl.float32)
        v = tl.load(given + v_channel, mask=row_used, other=0.0).to(tl.float32)
        b = tl.load(b_at + token * stride_ba).to(tl.float32)
        a = tl.load(b_at + token * stride_ba + HV).to(tl.float32)
        decay, beta = gates(a, b, log_rate, bias)
        decay = tl.exp(decay)
        query = normed(silu(q_oldest * q_w3 + q_older * q_w2 + q_old * q_w1 + q * q_w0)) * (K**-0.5)
        key_normed = normed(silu(k_oldest * k_w3 + k_older * k_w2 + k_old * k_w1 + k * k_w0))
        mixed = silu(v_oldest * v_w3 + v_older * v_w2 + v_old * v_w1 + v * v_w0)
        q_oldest, q_older, q_old = q_older, q_old, q
        k_oldest, k_older, k_old = k_older, k_old, k
        v_oldest, v_older, v_old = v_older, v_old, v
        both = tl.sum(query * key_normed, 0)
        query = tl.reshape(query, (GROUPS, INNER))[:, None, :]
        key_normed = tl.reshape(key_normed, (GROUPS, INNER))[:, None, :]
        # The state's answers before the token, which do not wait for each other.
        known = tl.sum(tl.sum(state * key_normed, 0), 1)
        asked = tl.sum(tl.sum(state * query, 0), 1)
        added = beta * (mixed - decay * known)
        state = state * decay + added[None, :, None] * key_normed
        value = decay * asked + both * added
        tl.store(out + token * stride_out + head * V + row, value.to(out.dtype.element_ty), mask=row_used)
        if SNAPSHOTS:  # noqa: SIM102 - constexpr, as the next
            if token + 1 == kept:
                _store_state(recurrent + kept_slot * stride_state + state_at, state, state_used)
        if VERIFIES:  # noqa: SIM102
            if verified != 0:
                if SEPARATE:
                    target = unverified + request * stride_unverified + token * stride_unverified_token
                else:
                    target = recurrent + tl.load(own_slots + token).to(tl.int64) * stride_state
                _store_state(target + state_at, state, state_used)

    if verified == 0:
        _store_state(recurrent + slot * stride_state + state_at, state, state_used)
    last = True
    if SHARED * BLOCKS > 1:
        last = is_last(arrivals + request * HK + key_head, SHARED * BLOCKS, AMD)
    else:
        tl.debug_barrier()
    own = conv + slot * stride_conv_slot
    copy = own
    if SNAPSHOTS:
        copy = conv + kept_slot * stride_conv_slot
    if SEPARATE:
        drafts = unverified_conv + request * stride_unverified_conv
        drafts_row = stride_unverified_row
        drafts_channel = stride_unverified_channel
    else:
        drafts = own
        drafts_row = stride_conv_row
        drafts_channel = stride_conv_channel
    _keep_all(
        own, drafts, copy, x, v_channel, row_used, v3, v2, v1, v_oldest, v_older, v_old, kept, verified, tokens,
        stride_x, drafts_row, drafts_channel, stride_conv_row, stride_conv_channel, W, SNAPSHOTS, VERIFIES,
    )  # fmt: skip
    if not last:
        return
    _keep_all(
        own, drafts, copy, x, q_channel, dim_used, q3, q2, q1, q_oldest, q_older, q_old, kept, verified, tokens,
        stride_x, drafts_row, drafts_channel, stride_conv_row, stride_conv_channel, W, SNAPSHOTS, VERIFIES,
    )  # fmt: skip
    _keep_all(
        own, drafts, copy, x, k_channel, dim_used, k3, k2, k1, k_oldest, k_older, k_old, kept, verified, tokens,
        stride_x, drafts_row, drafts_channel, stride_conv_row, stride_conv_channel, W, SNAPSHOTS, VERIFIES,
    )  # fmt: skip
    shared = tl.arange(0, SHARED_PADDED)
    column = tl.arange(0, V_PADDED)
    weight = tl.load(norm_weight + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
    within = (key_head * SHARED + shared)[:, None] * V + column[None, :]
    used = (shared < SHARED)[:, None] & (column < V)[None, :]
    for token in range(1 if SINGLE else tokens):
        at = out + token * stride_out + within
        values = tl.load(at, mask=used, other=0.0, cache_modifier=".cg").to(tl.float32)
        z = tl.load(x + token * stride_x + C + within, mask=used, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, 1) / V + eps)[:, None]
        tl.debug_barrier()  # several threads may have loaded what one stores
        gated = (values * factor * weight * silu(z)).to(out.dtype.element_ty)
        tl.store(at, gated, mask=used, eviction_policy=EVICT_LAST)


class TritonGatedDeltaDecode:
    """What :class:`.triton_prefill.TritonGatedDeltaNet` runs batches by for which :meth:`takes` is true.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        hopper: whether the GPU is a Hopper, which has its own kernel for many requests of one token.
    """

    def __init__(self, spec: GatedDeltaNetSpec, nvidia: bool, overlap: bool, hopper: bool = False) -> None:
        self.spec = spec
        self.nvidia, self.overlap = nvidia, overlap
        fits = hopper and HopperGatedDeltaDecode.fits(spec)
        self.many: HopperGatedDeltaDecode | None = HopperGatedDeltaDecode(spec, overlap) if fits else None
        keys = max(16, next_power_of_2(spec.key_dim))
        self.values: int = max(16, next_power_of_2(spec.value_dim))
        # A row's part of 128 bytes lies with eight threads.
        self.inner: int = min(keys, 128 // spec.state_dtype.itemsize)
        self.groups: int = keys // self.inner
        self.rows: int = min(self.values, _ROWS)
        # Graphs go on using the counters that they were captured with, so none is let go.
        self._arrivals: list[torch.Tensor] = []

    def takes(self, batch: Batch | BatchShape) -> bool:
        """Whether requests have few new tokens. A graph's ``max_query_len`` bounds every batch that it can replay."""
        return batch.max_query_len <= MAX_TOKENS

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        if self.many is not None and self.many.takes_shape(shape):
            yield "many"
        else:
            yield shape.max_query_len == 1, self.block(shape.num_requests)

    def block(self, num_requests: int) -> int:
        """Rows of a state that a program has. On an H200 64 requests of Qwen3-Next take 86 us with 16, 78 with 32."""
        programs = num_requests * self.spec.num_value_heads * cdiv(self.spec.value_dim, self.rows)
        return min(self.rows, _FEW_ROWS) if programs <= _FEW else self.rows

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
        if self.many is not None and self.many.takes(cache, batch):
            self.many(qkvz, ba, weights, cache, batch, out)
            return
        spec, states = self.spec, batch.states
        assert states is not None
        (conv, recurrent), snapshots = cache.tensors, states.snapshots
        assert_layout(spec, qkvz, ba, weights, recurrent, out)
        unverified_conv, unverified = cache.unverified or (None, None)
        if unverified is not None:
            assert unverified.stride()[2:] == recurrent.stride()[1:]
        if states.verifies is None:
            unverified_conv = unverified = None
        num_requests = states.slots.shape[0]
        assert batch.max_query_len <= MAX_TOKENS
        block = self.block(num_requests)
        blocks = cdiv(spec.value_dim, block)
        _gated_delta_decode[spec.num_value_heads * blocks, num_requests](
            qkvz,
            ba,
            out,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            conv,
            recurrent,
            unverified_conv,
            unverified,
            batch.query_start_loc,
            states.slots,
            batch.seq_lens,
            states.num_accepted,
            None if states.blocks is None else states.blocks.size,
            states.verifies,
            None if snapshots is None else snapshots.slots,
            None if snapshots is None else snapshots.tokens,
            self._counters(num_requests * spec.num_key_heads, qkvz.device),
            weights.eps,
            qkvz.stride(0),
            ba.stride(0),
            out.stride(0),
            *conv.stride(),
            recurrent.stride(0),
            states.slots.stride(0),
            *((0, 0, 0) if unverified_conv is None else unverified_conv.stride()),
            *((0, 0) if unverified is None else unverified.stride()[:2]),
            HK=spec.num_key_heads,
            HV=spec.num_value_heads,
            K=spec.key_dim,
            V=spec.value_dim,
            W=spec.conv_width,
            GROUPS=self.groups,
            INNER=self.inner,
            BLOCK_V=block,
            V_PADDED=self.values,
            SHARED_PADDED=next_power_of_2(spec.num_value_heads // spec.num_key_heads),
            SINGLE=batch.max_query_len == 1,
            OVERLAP=self.overlap,
            AMD=takes_amd_assembly(self.nvidia),
            num_warps=1,
            **launch_options(self.overlap),
        )

    def _counters(self, count: int, device: torch.device) -> torch.Tensor:
        """int32, zero between launches."""
        if not self._arrivals or self._arrivals[-1].numel() < count:
            fresh = torch.zeros(next_power_of_2(max(count, 4096)), dtype=torch.int32, device=device)
            if capturing(device):
                return fresh  # the graph makes them anew each time; they are zero only after it has run
            self._arrivals.append(fresh)
        return self._arrivals[-1]
