"""SGLang's ForwardBatch as the core's Batch.

What ``seq_lens`` counts, and how many query tokens a request has, depends on the mode:

    decode            lengths with the current token; one query each
    extend, mixed     lengths with the new tokens; ``extend_seq_lens`` queries
    target verify     lengths without the draft's tokens, of which each request has the same number
    draft extend      lengths with the accepted tokens; the same number of queries each
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from atom_core.batch import Batch, HostLengths, Pages

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from atom_core.mixers.base import TokenMixer
    from atom_plugin.sglang.attention_backend.kv_view import Pools


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch in its forward mode, which the host knows."""

    num_requests: int
    queries_each: int | None
    """Query tokens of every request. None: as ``extend_seq_lens`` says."""
    added_tokens: int
    """Tokens that the step adds beyond ``seq_lens``."""

    @property
    def num_tokens(self) -> int:
        """Of requests that all have the same number."""
        assert self.queries_each is not None
        return self.num_requests * self.queries_each

    @classmethod
    def of(cls, forward_batch: ForwardBatch, step: int = 0) -> Shape:
        """The shape of a batch; ``step`` counts the tokens that a draft has decoded since its lengths were taken."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            draft_tokens = int(forward_batch.spec_info.draft_token_num)
            return cls(forward_batch.batch_size, draft_tokens, draft_tokens)
        if mode.is_decode_or_idle():  # a rank without requests replays the other ranks' graph with padded rows
            return cls(forward_batch.batch_size, 1, step)
        return cls(forward_batch.batch_size, None, 0)


def longest(forward_batch: ForwardBatch, shape: Shape, fallback: int) -> int:
    """An upper bound of the requests' lengths after this step, from the host's copy where there is one.

    After drafts there is none: SGLang would have to wait until the GPU has counted the accepted tokens.
    """
    lengths = forward_batch.seq_lens_cpu
    if lengths is None or lengths.numel() == 0:
        return fallback
    return min(int(lengths.max()) + shape.added_tokens, fallback)


def eager_batch(forward_batch: ForwardBatch, pools: Pools, max_context: int, step: int = 0) -> Batch:
    """The batch of a step that runs outside captured graphs, in tensors of its own.

    Args:
        forward_batch: any mode but idle.
        pools: of the runner.
        max_context: the longest sequence that is served.
        step: see :meth:`Shape.of`.
    """
    batch = requests_of(forward_batch, max_context, step)
    table = pools.page_table(forward_batch.req_pool_indices, batch.max_seq_len)
    return replace(batch, pages=Pages(table, forward_batch.out_cache_loc))


def requests_of(forward_batch: ForwardBatch, max_context: int, step: int = 0) -> Batch:
    """:func:`eager_batch` without pages."""
    shape = Shape.of(forward_batch, step)
    device, host = forward_batch.seq_lens.device, None
    if shape.queries_each is not None:
        starts = torch.arange(shape.num_requests + 1, dtype=torch.int32, device=device) * shape.queries_each
        num_tokens, max_query_len = shape.num_tokens, shape.queries_each
    else:
        starts = torch.zeros(shape.num_requests + 1, dtype=torch.int32, device=device)
        starts[1:] = forward_batch.extend_seq_lens.cumsum(0)
        on_host = forward_batch.extend_seq_lens_cpu
        new = list(on_host) if on_host is not None else forward_batch.extend_seq_lens.tolist()
        num_tokens, max_query_len = sum(map(int, new)), max(map(int, new))
        # After drafts the host does not know how many tokens were accepted.
        if forward_batch.seq_lens_cpu is not None and not forward_batch.forward_mode.is_draft_extend_v2():
            host = HostLengths([0, *accumulate(map(int, new))], forward_batch.seq_lens_cpu.tolist())
    max_seq_len = longest(forward_batch, shape, max_context)
    decodes = shape.num_requests if forward_batch.forward_mode.is_decode() else 0
    return Batch(
        query_start_loc=starts,
        seq_lens=(forward_batch.seq_lens + shape.added_tokens).to(torch.int32),
        num_requests=shape.num_requests,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_decode_requests=decodes,
        num_decode_tokens=decodes,
        host=host,
    )


def windowed(batch: Batch, pools: Pools) -> Batch:
    """The same step for layers whose tokens are in the windowed pool."""
    return replace(
        batch,
        pages=Pages(pools.windowed_table(batch.pages.table), pools.windowed_slots(batch.pages.slots)),
    )


def planned(batch: Batch, mixer: TokenMixer) -> Batch:
    """The same step with the plan of ``mixer``, which the first layer of a step makes for all of its key."""
    if (key := mixer.plan_key()) is None:
        return batch
    plans = batch.scratch.setdefault("plans", {})
    if key not in plans:
        plans[key] = mixer.plan(batch)
    return batch.with_plans(plans)
