"""q/k norm and rope in plain torch: the definition. Arithmetic is float32, rounded once at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights


def qk_norm_rope(
    qkv: torch.Tensor, positions: torch.Tensor, weights: QkvWeights, *, spec: QkvSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :mod:`atom_core.kernels.qk_norm_rope`."""
    heads = qkv.view(qkv.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    cos_sin = weights.cos_sin[positions]
    q = _norm_and_rotate(q, weights.q_norm, weights.eps, cos_sin, spec.interleaved)
    k = _norm_and_rotate(k, weights.k_norm, weights.eps, cos_sin, spec.interleaved)
    return q, k, v


def _norm_and_rotate(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, cos_sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
        wide = wide.to(x.dtype).float()  # the model's norm rounds before rope
    rotary_dim = cos_sin.shape[-1]
    rotated, rest = wide[..., :rotary_dim], wide[..., rotary_dim:]
    cos, sin = cos_sin[:, None].float().chunk(2, dim=-1)
    if interleaved:
        even, odd = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, rest), dim=-1).to(x.dtype)
