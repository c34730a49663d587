"""Gated DeltaNet in plain torch: the definition, token by token, and the same in chunks. Arithmetic is float32.

One request: ``T`` tokens, ``Hk`` key heads of ``K`` elements, ``Hv`` value heads of ``V``. States are not written to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
