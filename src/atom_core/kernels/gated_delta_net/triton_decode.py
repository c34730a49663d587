"""Gated DeltaNet of few new tokens a request in Triton: one launch, from the projections to the gated norm.

A program takes a request and a key head, with all value heads that share it or with one of them. It keeps a state in
registers, all of it or some of its rows: it is read once, and written once, or after each token that is verified.

The inputs of a convolution move up in place, and value heads that share a key head need the same ones. Programs of one
value head each count that they have read them, and the last writes them.
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
from atom_core.kernels.gated_delta_net.triton_parts import L2_EPS, gates, located, seen, silu
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.triton_support import launch_options, takes_amd_assembly

if TYPE_CHECKING:
    from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec

#: The most new tokens of a request: a program takes them one by one.
MAX_TOKENS = 8
#: Elements of a state that a program has in its registers.
_ELEMENTS = 128 * 128


@triton.jit
def _mixed(
    weight, conv, x, channel, known, used, tokens, stride_x, stride_row, stride_channel,
    W: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The convolution and silu of some channels, ``[TOKENS, channels]``; what is behind the last token is arbitrary."""
    token = tl.arange(0, TOKENS)
    mixed = tl.zeros([TOKENS, channel.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        factor = tl.load(weight + channel * W + tap, mask=used, other=0.0).to(tl.float32)
        inputs = seen(conv, x, token + tap, channel, known, used, tokens, stride_x, stride_row, stride_channel, W)
        mixed += inputs * factor[None, :]
    return silu(mixed)


@triton.jit
def _normed(x):
    """Rows over their lengths."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)[:, None]


@triton.jit
def _token(x, token, TOKENS: tl.constexpr):
    """One row."""
    return tl.sum(tl.where(tl.arange(0, TOKENS)[:, None] == token, x, 0.0), 0)


@triton.jit
def _keep(
    inputs, own, drafts, copy, channel, used, kept, verified, tokens,
    drafts_row, drafts_channel, stride_row, stride_channel,
    W: tl.constexpr, ROWS: tl.constexpr, SNAPSHOTS: tl.constexpr, VERIFIES: tl.constexpr,
):  # fmt: skip
    """Write what is kept of some channels' inputs, which may move up in place: all threads have loaded them."""
    row = tl.arange(0, ROWS)[:, None]
    place = channel.to(tl.int64)[None, :]
    moved = row - tokens
    last = own + moved * stride_row + place * stride_channel
    if SNAPSHOTS:
        at = row - kept
        target = copy + at * stride_row + place * stride_channel
        inside = (at >= 0) & (at < tl.where(kept > 0, W - 1, 0))
        tl.store(target, inputs.to(copy.dtype.element_ty), mask=inside & used[None, :])
    if VERIFIES:
        at = row - 1
        target = drafts + at * drafts_row + place * drafts_channel
        inside = (at >= 0) & (at < tl.where(verified != 0, W - 2 + tokens, 0))
        tl.store(target, inputs.to(drafts.dtype.element_ty), mask=inside & used[None, :])
        moved = tl.where(verified != 0, -1, moved)
    tl.store(last, inputs.to(own.dtype.element_ty), mask=(moved >= 0) & (moved < W - 1) & used[None, :])


@triton.jit
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
    has_state,
    num_accepted,
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
    AMD: tl.constexpr,
):
    SHARED: tl.constexpr = HV // HK
    C: tl.constexpr = 2 * HK * K + HV * V
    SNAPSHOTS: tl.constexpr = snapshot_slots is not None
    VERIFIES: tl.constexpr = verifies is not None
    SEPARATE: tl.constexpr = unverified is not None
    STATE: tl.constexpr = recurrent.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first_head = tl.program_id(0) * HEADS
    request = tl.program_id(1).to(tl.int64)
    key_head = first_head // SHARED
    begin = tl.load(query_start_loc + request).to(tl.int64)
    tokens = (tl.load(query_start_loc + request + 1) - begin).to(tl.int32)
    slot, source, has, first = located(slots, has_state, num_accepted, request, stride_slots)
    kept = 0
    if SNAPSHOTS:
        kept = tl.load(snapshot_tokens + request)
        kept_slot = tl.load(snapshot_slots + request).to(tl.int64)
        kept = tl.where(kept_slot > 0, kept, 0)
    verified = 0
    if VERIFIES:
        verified = tl.load(verifies + request).to(tl.int32)
    if (tokens == 0) | (slot <= 0):
        return

    # The state has three dimensions so that each thread has numbers of few rows: sums over keys stay in a few threads.
    group = tl.arange(0, GROUPS)[:, None, None]
    inner = tl.arange(0, INNER)[None, None, :]
    key = group * INNER + inner
    row = tl.arange(0, BLOCK_V)
    within = row[None, :, None] * K + key
    from_cache = recurrent + source * stride_state
    ONE: tl.constexpr = HEADS * BLOCKS == 1
    if ONE:
        state_known = (key < has * K) & (row < V)[None, :, None]
        held = tl.load(from_cache + first_head * (V * K) + within, mask=state_known, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    dim = tl.arange(0, GROUPS * INNER)
    dim_used = dim < K
    dim_known = dim < has * K
    q_channel = key_head * K + dim
    k_channel = (HK + key_head) * K + dim
    window = conv + slot * stride_conv_slot + first * stride_conv_row
    x = qkvz + begin * stride_x
    place = tl.arange(0, ROWS)
    token_row = tl.arange(0, TOKENS)
    q_seen = seen(
        window, x, place, q_channel, dim_known, dim_used, tokens, stride_x, stride_conv_row, stride_conv_channel, W
    )
    k_seen = seen(
        window, x, place, k_channel, dim_known, dim_used, tokens, stride_x, stride_conv_row, stride_conv_channel, W
    )
    queries = _mixed(
        conv_weight, window, x, q_channel, dim_known, dim_used, tokens, stride_x,
        stride_conv_row, stride_conv_channel, W, TOKENS,
    )  # fmt: skip
    keys = _mixed(
        conv_weight, window, x, k_channel, dim_known, dim_used, tokens, stride_x,
        stride_conv_row, stride_conv_channel, W, TOKENS,
    )  # fmt: skip
    queries = _normed(queries) * (K**-0.5)
    keys = _normed(keys)
    both = tl.sum(queries * keys, 1)
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
    writes = True
    if HEADS < SHARED:
        writes = is_last(arrivals + request * HK + key_head, SHARED // HEADS, AMD)
    else:
        tl.debug_barrier()  # several threads have loaded what one stores
    if writes:
        _keep(
            q_seen, own, drafts, copy, q_channel, dim_used, kept, verified, tokens, drafts_row, drafts_channel,
            stride_conv_row, stride_conv_channel, W, ROWS, SNAPSHOTS, VERIFIES,
        )  # fmt: skip
        _keep(
            k_seen, own, drafts, copy, k_channel, dim_used, kept, verified, tokens, drafts_row, drafts_channel,
            stride_conv_row, stride_conv_channel, W, ROWS, SNAPSHOTS, VERIFIES,
        )  # fmt: skip

    for index in range(HEADS):
        head = first_head + index
        token_known = token_row < tokens
        at = ba + (begin + token_row) * stride_ba + head
        b = tl.load(at, mask=token_known, other=0.0).to(tl.float32)
        a = tl.load(at + HV, mask=token_known, other=0.0).to(tl.float32)
        decays, betas = gates(a, b, tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
        decays = tl.exp(decays)
        outputs = tl.zeros([TOKENS, BLOCKS, BLOCK_V], tl.float32)
        for block in range(BLOCKS):
            value_row = block * BLOCK_V + row
            row_used = value_row < V
            row_known = value_row < has * V
            state_at = head * (V * K) + block * (BLOCK_V * K) + within
            state_used = (key < K) & row_used[None, :, None]
            if not ONE:
                state_known = (key < has * K) & row_used[None, :, None]
                held = tl.load(from_cache + state_at, mask=state_known, other=0.0)
            channel = 2 * HK * K + head * V + value_row
            v_seen = seen(
                window,
                x,
                place,
                channel,
                row_known,
                row_used,
                tokens,
                stride_x,
                stride_conv_row,
                stride_conv_channel,
                W,
            )
            values = _mixed(
                conv_weight, window, x, channel, row_known, row_used, tokens, stride_x,
                stride_conv_row, stride_conv_channel, W, TOKENS,
            )  # fmt: skip
            tl.debug_barrier()  # several threads have loaded what one stores
            _keep(
                v_seen, own, drafts, copy, channel, row_used, kept, verified, tokens, drafts_row, drafts_channel,
                stride_conv_row, stride_conv_channel, W, ROWS, SNAPSHOTS, VERIFIES,
            )  # fmt: skip
            state = held.to(tl.float32)
            for token in range(1 if SINGLE else tokens):
                query = tl.reshape(_token(queries, token, TOKENS), (GROUPS, INNER))[:, None, :]
                normed = tl.reshape(_token(keys, token, TOKENS), (GROUPS, INNER))[:, None, :]
                decay = tl.sum(tl.where(token_row == token, decays, 0.0), 0)
                beta = tl.sum(tl.where(token_row == token, betas, 0.0), 0)
                product = tl.sum(tl.where(token_row == token, both, 0.0), 0)
                # The state's answers before the token, which do not wait for each other.
                known = tl.sum(tl.sum(state * normed, 0), 1)
                asked = tl.sum(tl.sum(state * query, 0), 1)
                added = beta * (_token(values, token, TOKENS) - decay * known)
                state = state * decay + added[None, :, None] * normed
                value = decay * asked + product * added
                mine = (token_row == token)[:, None, None] & (tl.arange(0, BLOCKS) == block)[None, :, None]
                outputs = tl.where(mine, value[None, None, :], outputs)
                if SNAPSHOTS:  # noqa: SIM102 - constexpr, as the next
                    if token + 1 == kept:
                        tl.store(recurrent + kept_slot * stride_state + state_at, state.to(STATE), mask=state_used)
                if VERIFIES:  # noqa: SIM102
                    if verified != 0:
                        if SEPARATE:
                            target = unverified + request * stride_unverified + token * stride_unverified_token
                        else:
                            target = recurrent
                            target += tl.load(slots + request * stride_slots + token).to(tl.int64) * stride_state
                        tl.store(target + state_at, state.to(target.dtype.element_ty), mask=state_used)
            if verified == 0:
                tl.store(recurrent + slot * stride_state + state_at, state.to(STATE), mask=state_used)

        column = (tl.arange(0, BLOCKS)[:, None] * BLOCK_V + row[None, :])[None, :, :]
        weight = tl.load(norm_weight + column, mask=column < V, other=0.0).to(tl.float32)
        used = token_known[:, None, None] & (column < V)
        gate_at = x + C + head * V + token_row[:, None, None] * stride_x + column
        gate = tl.load(gate_at, mask=used, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(tl.sum(outputs * outputs, 2), 1) / V + eps)[:, None, None]
        out_at = out + (begin + token_row)[:, None, None] * stride_out + head * V + column
        normed_outputs = outputs * factor * weight * silu(gate)
        tl.store(out_at, normed_outputs.to(out.dtype.element_ty), mask=used, eviction_policy=EVICT_LAST)


class TritonGatedDeltaDecode:
    """See :mod:`atom_core.kernels.gated_delta_net`.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: GatedDeltaNetSpec, nvidia: bool, overlap: bool) -> None:
        self.spec = spec
        self.nvidia, self.overlap = nvidia, overlap
        keys = max(16, triton.next_power_of_2(spec.key_dim))
        self.values: int = max(16, triton.next_power_of_2(spec.value_dim))
        # A row's part of 128 bytes lies with eight threads.
        self.inner: int = min(keys, 128 // spec.state_dtype.itemsize)
        self.groups: int = keys // self.inner
        self.block: int = min(self.values, _ELEMENTS // keys)
        self.warps = 8
        self.heads = spec.num_value_heads // spec.num_key_heads
        self.options: dict[str, int] = {}
        # Graphs go on using the counters that they were captured with, so none is let go.
        self._arrivals: list[torch.Tensor] = []

    def takes(self, batch: Batch | BatchShape) -> bool:
        """Whether requests have few new tokens. A graph's ``max_query_len`` bounds every batch that it can replay."""
        return batch.max_query_len <= MAX_TOKENS

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        yield shape.max_query_len == 1

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
        spec, states = self.spec, batch.states
        assert states is not None
        (conv, recurrent), snapshots = cache.tensors, states.snapshots
        assert qkvz.stride(-1) == ba.stride(-1) == 1
        assert out.stride()[1:] == (spec.value_dim, 1)
        assert recurrent.stride()[1:] == (spec.value_dim * spec.key_dim, spec.key_dim, 1)
        unverified_conv, unverified = cache.unverified or (None, None)
        if unverified is not None:
            assert unverified.stride()[2:] == recurrent.stride()[1:]
        if states.verifies is None:
            unverified_conv = unverified = None
        assert all(it.is_contiguous() for it in (weights.conv, weights.a_log, weights.dt_bias, weights.norm))
        num_requests = states.slots.shape[0]
        heads = self.heads
        rows_of_tokens = 4 if batch.max_query_len <= 4 else MAX_TOKENS
        assert batch.max_query_len <= MAX_TOKENS
        _gated_delta_decode[spec.num_value_heads // heads, num_requests](
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
            states.has_state,
            states.num_accepted,
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
            TOKENS=rows_of_tokens,
            ROWS=triton.next_power_of_2(spec.conv_width - 1 + rows_of_tokens),
            HEADS=heads,
            GROUPS=self.groups,
            INNER=self.inner,
            BLOCKS=self.values // self.block,
            BLOCK_V=self.block,
            SINGLE=batch.max_query_len == 1,
            OVERLAP=self.overlap,
            AMD=takes_amd_assembly(self.nvidia),
            num_warps=self.warps,
            **self.options,
            **launch_options(self.overlap),
        )

    def _counters(self, count: int, device: torch.device) -> torch.Tensor | None:
        """int32, zero between launches; None where no value heads share a key head."""
        if self.spec.num_key_heads == self.spec.num_value_heads:
            return None
        if not self._arrivals or self._arrivals[-1].numel() < count:
            fresh = torch.zeros(triton.next_power_of_2(max(count, 4096)), dtype=torch.int32, device=device)
            if capturing(device):
                return fresh  # the graph makes them anew each time; they are zero only after it has run
            self._arrivals.append(fresh)
        return self._arrivals[-1]
