"""Attention over expanded latents by aiter's flash attention, a chunk of keys at a time.

As in Triton's kernel a chunk's rows are gathered from their pages, and expanded by one product; here each head's keys
are laid out whole, with what is rotated behind the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_prefill.plan import PrefillPlan, gathered
from atom_core.kernels.mla_prefill.ranges import RangesCall, calls_of


class AiterMlaPrefill:
    """See :mod:`atom_core.kernels.mla_prefill`."""

    def __init__(self, spec: MlaAttentionSpec) -> None:
        require("aiter.flash_attn_varlen_func")
        self.spec, shape = spec, spec.latent
        self.laid_out = shape.nope_dim + shape.rope_dim + shape.value_dim

    def __call__(
        self,
        q: torch.Tensor,
        expand: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        plan: PrefillPlan,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of the plan's requests to ``out``."""
        shape = self.spec.latent
        sums = _Sums(out)
        for chunk in plan.chunks:
            rows = gathered(chunk, cache, batch, q.dtype)
            expanded = F.linear(rows[:, : shape.rank], expand.flatten(0, 1))
            expanded = torch.unflatten(expanded, -1, (shape.num_heads, -1))
            turned = rows[:, None, shape.rank :].expand(-1, shape.num_heads, -1)
            keys = torch.cat((expanded[..., : shape.nope_dim], turned), -1)
            values = expanded[..., shape.nope_dim :].contiguous()
            for call in calls_of(chunk, plan, q.device):
                begin, end = call.keys
                self._run(call, q, keys[begin:end], values[begin:end], out, sums)
        sums.write()

    def _run(
        self,
        call: RangesCall,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        sums: _Sums,
    ) -> None:
        queries = torch.cat([q[begin:end] for begin, end in call.queries])
        found, logarithms = _attend(
            queries,
            keys,
            values,
            call.query_starts,
            call.key_starts,
            call.max_queries,
            call.max_keys,
            self.spec.scale,
            call.causal,
            not call.whole,
        )
        if not call.whole:
            ((begin, end),) = call.queries
            sums.add(begin, end, found, logarithms)
            return
        counts = [end - begin for begin, end in call.queries]
        for (begin, end), part in zip(call.queries, torch.split(found, counts), strict=True):
            out[begin:end] = part


class _Sums:
    """Answers to queries that see keys of several calls, summed up in float32, as ``out [T, H, V]`` is to have them."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        #: Float32 ``[T, H, V]``, and the logarithms of the softmax's sums ``[T, H]``; made at need.
        self.sums: torch.Tensor | None = None
        self.logarithms: torch.Tensor | None = None
        self.ranges: set[tuple[int, int]] = set()

    def add(self, begin: int, end: int, found: torch.Tensor, logarithms: torch.Tensor) -> None:
        """``found [t, H, V]`` and the logarithms of its softmax's sums ``[H, t]``, of tokens ``begin .. end - 1``."""
        if self.sums is None or self.logarithms is None:
            self.sums = torch.zeros(self.out.shape, dtype=torch.float32, device=self.out.device)
            self.logarithms = self.sums.new_full(self.out.shape[:2], float("-inf"))
        before, new = self.logarithms[begin:end], logarithms.t()
        both = torch.logaddexp(before, new)
        part = self.sums[begin:end]
        part.mul_((before - both).exp()[..., None]).add_(found.float() * (new - both).exp()[..., None])
        before.copy_(both)
        self.ranges.add((begin, end))

    def write(self) -> None:
        """Have ``out`` what was summed up."""
        if self.sums is not None:
            for begin, end in self.ranges:
                self.out[begin:end] = self.sums[begin:end].to(self.out.dtype)


def _like(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    causal: bool,
    logarithms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[1], q.shape[0]) if logarithms else (0, 0)
    return q.new_empty(*q.shape[:2], values.shape[-1]), q.new_empty(shape, dtype=torch.float32)


@custom_op("aiter_flash_attention", _like)
def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    causal: bool,
    logarithms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without logarithms gfx950 has a kernel of its own for these sizes.
    found = aiter_function("aiter.flash_attn_varlen_func")(
        q,
        keys,
        values,
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        softmax_scale=scale,
        causal=causal,
        return_lse=logarithms,
    )
    return (found[0], found[1]) if logarithms else (found, q.new_empty((0, 0), dtype=torch.float32))
