"""Attention: norm, projections, the attention op, product, residual sum."""

from __future__ import annotations

import torch

from atom_core.fusion.normed_linear import NormedLinear
from atom_core.fusion.stream import ResidualLinear, Stream, StreamNorm
from atom_core.layers.attention import Attention
from atom_core.layers.mla import LatentAttention
from atom_core.runtime import Runtime


class FusedAttention:
    """A norm and the attention behind it, which adds to the stream."""

    def __init__(self, norm: StreamNorm, attention: Attention, runtime: Runtime) -> None:
        self.qkv = NormedLinear(norm, attention.qkv_proj, None, runtime)
        self.attn, self.out = attention.attn, ResidualLinear(attention.o_proj)

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream behind it."""
        qkv, residual = self.qkv(stream)
        return self.out(self.attn(qkv, positions, step), residual)


class FusedLatentAttention:
    """The same over latents (MLA)."""

    def __init__(self, norm: StreamNorm, attention: LatentAttention, runtime: Runtime) -> None:
        self.down = NormedLinear(norm, attention.fused_qkv_a_proj_with_mqa, None, runtime)
        self.widths = attention.widths
        #: From compressed queries to queries; None: they are not compressed.
        self.queries = (
            NormedLinear(StreamNorm(attention.q_a_layernorm, runtime), attention.q_b_proj, None, runtime)
            if attention.compressed
            else None
        )
        self.attn, self.out = attention.attn, ResidualLinear(attention.o_proj)

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream behind it."""
        down, residual = self.down(stream)
        q, latent = torch.split(down, self.widths, -1)
        if self.queries is not None:
            q, _ = self.queries(Stream(None, q))
        return self.out(self.attn(q, latent, positions, step), residual)
