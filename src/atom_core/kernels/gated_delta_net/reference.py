"""Gated DeltaNet in plain torch: the definition, token by token, and the same in chunks. Arithmetic is float32.

One request: ``T`` tokens, ``Hk`` key heads of ``K`` elements, ``Hv`` value heads of ``V``. States are not written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

from atom_core.batch import Batch, States
from atom_core.cache import StateView
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.types import GraphSupport

#: Tokens of a chunk.
CHUNK = 64
#: Added to the squared length in the L2 norm of q and k.
L2_EPS = 1e-6


def causal_conv(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A depthwise causal convolution without bias, then silu.

    Args:
        x: ``[T, C]``.
        weight: ``[C, W]``; the last tap is the token's own.
        state: ``[W - 1, C]``, the tokens before; zeros for a new request.

    Returns:
        ``[T, C]``, and the state after the tokens.
    """
    seen = torch.cat((state, x)).float()
    taps = weight.float().t()
    mixed = sum((seen[tap : tap + len(x)] * taps[tap] for tap in range(len(taps))), torch.zeros_like(x).float())
    return F.silu(mixed).to(x.dtype), seen[len(x) :].to(state.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay ``g`` and ``beta``, both float32 ``[T, Hv]``, from projections ``a, b [T, Hv]``."""
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token.

    Args:
        q, k: ``[T, Hk, K]``, neither normed nor scaled.
        v: ``[T, Hv, V]``.
        g, beta: float32 ``[T, Hv]``.
        state: float32 ``[Hv, V, K]``; zeros for a new request.

    Returns:
        ``[T, Hv, V]`` in v's dtype, and the state after the tokens.
    """
    queries, keys = _by_value_head(q, k, v.shape[1])
    outputs = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for token in range(len(v)):
        key = keys[token].unsqueeze(-1)
        state = state * g[token].exp()[:, None, None]
        error = v[token].float() - (state @ key).squeeze(-1)
        state = state + (beta[token][:, None] * error).unsqueeze(-1) * key.mT
        outputs[token] = (state @ queries[token].unsqueeze(-1)).squeeze(-1)
    return outputs.to(v.dtype), state


def chunked_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`gated_delta_rule`, by matrix products over ``chunk`` tokens at a time (arXiv 2412.06464, section 3.3).

    Within a chunk let ``G`` be the sum of ``g`` up to a token. The state after token ``t`` is
    ``exp(G_t) S + sum over j <= t of exp(G_t - G_j) u_j k_j^T``, where ``u`` solves the triangular system
    ``u_t + beta_t sum over j < t of exp(G_t - G_j) (k_t . k_j) u_j = beta_t (v_t - exp(G_t) S k_t)``.
    """
    queries, keys = (side.transpose(0, 1) for side in _by_value_head(q, k, v.shape[1]))
    values, decays, factors = v.float().transpose(0, 1), g.t(), beta.t().unsqueeze(-1)
    outputs = torch.empty_like(values)
    for begin in range(0, len(v), chunk):
        at = slice(begin, begin + chunk)
        query, key, value, factor = queries[:, at], keys[:, at], values[:, at], factors[:, at]
        total = decays[:, at].cumsum(-1)
        # Only differences that are not positive are exponentiated: the others may overflow.
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        since = total.exp().unsqueeze(-1)
        system = (factor * (key @ key.mT) * between).tril(-1)
        wanted = factor * (value - since * (key @ state.mT))
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs[:, at] = since * (query @ state.mT) + ((query @ key.mT) * between) @ added
        left = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * total[:, -1].exp()[:, None, None] + (left * added).mT @ key
    return outputs.transpose(0, 1).to(v.dtype), state


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm(x) * weight * silu(z)`` over the last dimension: ``x, z [T, Hv, V]``, ``weight [V]``."""
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed.float() * F.silu(z.float())).to(x.dtype)


def _by_value_head(q: torch.Tensor, k: torch.Tensor, num_value_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, L2-normed and q scaled, float32 ``[T, Hv, K]``."""
    shared, size = num_value_heads // q.shape[1], q.shape[-1]

    def normed(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)
        return wide.repeat_interleave(shared, 1)

    return normed(q) * size**-0.5, normed(k)


Rule: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class OneByOne:
    """The op, request by request; see :mod:`atom_core.kernels.gated_delta_net`.

    ``rule``: :func:`gated_delta_rule`, which is the definition, or :func:`chunked_gated_delta_rule`.
    """

    graph_support: GraphSupport = "none"

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def scratch_bytes(self, num_tokens: int, max_requests: int) -> int:
        """See :class:`atom_core.kernels.gated_delta_net.GatedDeltaNetKernel`: little beside a step's other tensors."""
        return 0

    def __call__(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        cache: StateView,
        batch: Batch,
        out: torch.Tensor,
    ) -> None:
        """See :class:`atom_core.kernels.gated_delta_net.GatedDeltaNetKernel`."""
        states = batch.states
        assert states is not None
        starts, lengths, slots = (
            batch.query_start_loc.tolist(),
            batch.seq_lens.tolist(),
            states.slots_of(batch.seq_lens),
        )
        for row in range(batch.num_requests):
            tokens = slice(starts[row], starts[row + 1])
            if tokens.start < tokens.stop and int(slots[row, 0]) > 0:
                has_state = lengths[row] > tokens.stop - tokens.start
                request = _Request(cache, states, row, slots[row].tolist(), has_state)
                out[tokens] = request.run(qkvz[tokens], ba[tokens], weights, self.rule)


class _Request:
    """One request's states in a step."""

    def __init__(self, cache: StateView, states: States, row: int, slots: list[int], has_state: bool) -> None:
        self.conv, self.recurrent = cache.tensors
        self.cache, self.row, self.slots, self.has_state = cache, row, slots, has_state
        self.first = 0 if states.num_accepted is None else int(states.num_accepted[row]) - 1
        self.verifies = states.verifies is not None and bool(states.verifies[row])
        self.snapshot = None
        if states.snapshots is not None:
            self.snapshot = int(states.snapshots.slots[row]), int(states.snapshots.tokens[row])

    def run(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        rule: Rule,
    ) -> torch.Tensor:
        """The request's new tokens: ``[T, Hv, V]``."""
        (channels, width), (value_heads, value_dim, key_dim) = weights.conv.shape, self.recurrent.shape[1:]
        window = self.conv[self.slots[0], self.first : self.first + width - 1]
        state = self.recurrent[self.slots[self.first]].float()
        if not self.has_state:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        inputs, z = qkvz[:, :channels], torch.unflatten(qkvz[:, channels:], -1, (value_heads, value_dim))
        b, a = torch.split(ba, value_heads, -1)
        mixed, _ = causal_conv(inputs, weights.conv, window)
        keys = channels - value_heads * value_dim
        q, k = (torch.unflatten(it, -1, (-1, key_dim)) for it in mixed[:, :keys].chunk(2, -1))
        v = torch.unflatten(mixed[:, keys:], -1, (value_heads, value_dim))
        g, beta = gates(a, b, weights.a_log, weights.dt_bias)
        seen = torch.cat((window, inputs.to(window.dtype)))
        rows = (q, k, v, g, beta)
        wanted = range(1, len(qkvz) + 1) if self.verifies else sorted({len(qkvz), self._snapshot_at(len(qkvz))})
        mixed_values, done = [], 0
        for count in wanted:
            value, state = rule(*(it[done:count] for it in rows), state)
            mixed_values.append(value)
            done = count
            self._write(count, len(qkvz), seen, state, width)
        return gated_rms_norm(torch.cat(mixed_values), z, weights.norm, weights.eps)

    def _snapshot_at(self, total: int) -> int:
        slot, tokens = self.snapshot or (0, 0)
        return tokens if slot > 0 and 0 < tokens <= total else total

    def _write(self, count: int, total: int, seen: torch.Tensor, state: torch.Tensor, width: int) -> None:
        """Write what is kept after ``count`` of ``total`` tokens; ``seen`` has the convolution's inputs so far."""
        after = seen[count : count + width - 1]
        if self.snapshot is not None and self.snapshot[0] > 0 and self.snapshot[1] == count:
            self._put(self.cache.tensors, self.snapshot[0], after, state)
        if self.verifies and self.cache.unverified:
            conv, recurrent = self.cache.unverified
            recurrent[self.row, count - 1] = state.to(recurrent.dtype)
            if count == total:
                conv[self.row, : width - 2 + total] = seen[1:].to(conv.dtype)
        elif self.verifies:
            self.recurrent[self.slots[count - 1]] = state.to(self.recurrent.dtype)
            if count == total:
                self.conv[self.slots[0], : width - 2 + total] = seen[1:].to(self.conv.dtype)
        elif count == total:
            self._put(self.cache.tensors, self.slots[0], after, state)

    @staticmethod
    def _put(tensors: tuple[torch.Tensor, ...], slot: int, window: torch.Tensor, state: torch.Tensor) -> None:
        conv, recurrent = tensors
        conv[slot, : len(window)] = window.to(conv.dtype)
        recurrent[slot] = state.to(recurrent.dtype)
