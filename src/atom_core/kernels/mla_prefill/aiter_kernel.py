"""Attention over expanded latents by aiter's flash attention, one chunk of keys at a time.

As in the Triton kernel, a chunk's rows are gathered from their pages and expanded by one product. Here each head's keys
are contiguous, with the rope dimension last.
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
        partials = _PartialOutputs(out)
        for chunk in plan.chunks:
            rows = gathered(chunk, cache, batch, q.dtype)
            expanded = F.linear(rows[:, : shape.rank], expand.flatten(0, 1))
            expanded = torch.unflatten(expanded, -1, (shape.num_heads, -1))
            rope_keys = rows[:, None, shape.rank :].expand(-1, shape.num_heads, -1)
            keys = torch.cat((expanded[..., : shape.nope_dim], rope_keys), -1)
            values = expanded[..., shape.nope_dim :].contiguous()
            for call in calls_of(chunk, plan, q.device):
                begin, end = call.keys
                self._run(call, q, keys[begin:end], values[begin:end], out, partials)
        partials.write()

    def _run(
        self,
        call: RangesCall,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        partials: _PartialOutputs,
    ) -> None:
        queries = torch.cat([q[begin:end] for begin, end in call.queries])
        found, lse = _attend(
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
            partials.add(begin, end, found, lse)
            return
        counts = [end - begin for begin, end in call.queries]
        for (begin, end), attended in zip(call.queries, torch.split(found, counts), strict=True):
            out[begin:end] = attended


class _PartialOutputs:
    """Outputs of queries that see keys of several calls, merged in float32 and written to ``out [T, H, V]``."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        #: float32 ``[T, H, V]`` and the log-sum-exp of the scores ``[T, H]``; allocated when needed.
        self.partials: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self.ranges: set[tuple[int, int]] = set()

    def add(self, begin: int, end: int, found: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge ``found [t, H, V]`` with log-sum-exp ``lse [H, t]`` into tokens ``begin .. end - 1``."""
        if self.partials is None or self.lse is None:
            self.partials = torch.zeros(self.out.shape, dtype=torch.float32, device=self.out.device)
            self.lse = self.partials.new_full(self.out.shape[:2], float("-inf"))
        before, new = self.lse[begin:end], lse.t()
        both = torch.logaddexp(before, new)
        merged = self.partials[begin:end]
        merged.mul_((before - both).exp()[..., None]).add_(found.float() * (new - both).exp()[..., None])
        before.copy_(both)
        self.ranges.add((begin, end))

    def write(self) -> None:
        """Write the merged outputs to ``out``."""
        if self.partials is not None:
            for begin, end in self.ranges:
                self.out[begin:end] = self.partials[begin:end].to(self.out.dtype)


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
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[1], q.shape[0]) if lse else (0, 0)
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
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without lse, gfx950 has a special kernel for these sizes.
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
        return_lse=lse,
    )
    return (found[0], found[1]) if lse else (found, q.new_empty((0, 0), dtype=torch.float32))
