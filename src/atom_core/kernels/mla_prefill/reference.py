"""Attention over expanded latents in plain torch: the definition, one request at a time."""

from __future__ import annotations

import torch

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.mla_attention.reference import cached_rows, unseen
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_prefill.plan import PrefillPlan


class ReferenceMlaPrefill:
    """See :mod:`atom_core.kernels.mla_prefill`; float32 arithmetic, rounded once. It has no chunks."""

    laid_out = 0

    def __init__(self, spec: MlaAttentionSpec) -> None:
        self.spec = spec

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
        for request in plan.expanded:
            begin, end, length = plan.host.starts[request], plan.host.starts[request + 1], plan.host.lengths[request]
            rows = cached_rows(cache, batch.pages.table[request], length)
            latents, rope_keys = torch.split(rows, [shape.rank, shape.rope_dim], -1)
            expanded = torch.einsum("kl,hdl->khd", latents, expand.float())
            keys, values = torch.split(expanded, [shape.nope_dim, shape.value_dim], -1)
            nope_queries, rope_queries = torch.split(q[begin:end].float(), [shape.nope_dim, shape.rope_dim], -1)
            scores = torch.einsum("qhd,khd->hqk", nope_queries, keys) + torch.einsum(
                "qhd,kd->hqk", rope_queries, rope_keys
            )
            hidden = unseen(end - begin, length, q.device)
            weights = (scores * self.spec.scale).masked_fill(hidden, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
