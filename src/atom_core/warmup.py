"""One run for each kind of batch that a model will serve, so that no request waits for a kernel to be compiled.

Which variants of a kernel there are is the kernel's business. From outside they differ by how many requests and tokens
a batch has, whether requests bring one token or many, and how long they may be at most; so a handful of each is run.
Nothing is written to the cache, and what is read from it is the page of number 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch

from atom_core.batch import Batch, HostLengths, Pages
from atom_core.models.decoder import Carried, DecoderForCausalLM
from atom_core.models.draft import DraftModel
from atom_core.runtime import Runtime
from atom_core.standalone import plan

#: Prompts at most as long: kernels that take all tokens of a prompt do not change any more beyond.
_LONGEST_PROMPT = 2048
#: Lengths up to which a decode does not share out a request's keys, and up to which it does.
_SHORT, _SHARED = 64, 4096
#: New tokens behind cached ones, the last number more than attention over latents decodes; of how many requests,
#: by which programs share heads and keys; and how many are cached: enough that expanding them would cost more.
_FEW_TOKENS, _REQUESTS, _CACHED = (2, 4, 8, 24), (1, 8, 16, 32, 64, 96), 64
#: Lengths of prompts: what a tile of queries takes, and an odd number more.
_PROMPTS = (5, 16, 64, 257, _LONGEST_PROMPT)
#: Tokens of prompts: experts sort and multiply them by tiles that change at other numbers for each model, and odd ones
#: otherwise than even ones. These reach all variants of the models in :mod:`atom_plugin.bench.models`.
_TOKENS = (3, 9, 17, 33, 65, 101, 129, 174, 229, 258, 292, 513, 516, 577, 768, 1024, 4096, 8192)


@dataclass(frozen=True)
class BatchShape:
    """What the host knows of a batch."""

    queries: tuple[int, ...]
    """New tokens of each request."""
    max_seq_len: int
    """An upper bound of any request's length."""
    cached: int = 0
    """Tokens of each request that are there already."""


def batches_to_serve(max_requests: int, max_tokens: int, max_seq_len: int) -> list[BatchShape]:
    """Batches of every kind that an engine with these limits can make.

    Decodes, prefills, both in one, and prompts of which all but a few tokens are cached.
    """
    longest = min(_LONGEST_PROMPT, max_seq_len)
    found = [BatchShape((1,) * size, max_seq_len) for size in sorted({1, 2, 8, 16, 32, 64, 128, max_requests})]
    for length in (_SHORT, _SHARED):
        found += [BatchShape((new,) * size, length) for size in (1, 3) for new in (1, 2)]
    for prompt in _PROMPTS:
        found += [BatchShape((prompt,), max_seq_len), BatchShape((1, 1, prompt), max_seq_len)]
    found += [BatchShape(_prompts(tokens, longest), max_seq_len) for tokens in (*_TOKENS, max_tokens)]
    found += [BatchShape((*(1,) * 8, new), max_seq_len, _CACHED) for new in _FEW_TOKENS]
    for size in _REQUESTS:
        found += [BatchShape((new,) * size, _SHORT, _SHORT - new) for new in (1, *_FEW_TOKENS)]
        found += [BatchShape((new,) * size, max_seq_len, _CACHED) for new in _FEW_TOKENS]
    possible = (
        shape
        for shape in found
        if len(shape.queries) <= max_requests
        and sum(shape.queries) <= max_tokens
        and max(shape.queries) + shape.cached <= shape.max_seq_len <= max_seq_len
    )
    return list(dict.fromkeys(possible))


def _prompts(tokens: int, longest: int) -> tuple[int, ...]:
    """So many tokens of prompts, none of which has more than ``longest``."""
    whole, rest = divmod(tokens, longest)
    return (longest,) * whole + (rest,) * (rest > 0)


def metadata_of(
    shape: BatchShape, model: DecoderForCausalLM | DraftModel, table_width: int, device: torch.device
) -> Batch:
    """``batch`` as ``model``'s kernels are told of it: no token has a slot, and all pages are page 0."""
    num_requests, num_tokens = len(shape.queries), sum(shape.queries)
    decodes = next((at for at, new in enumerate(shape.queries) if new > 1), num_requests)
    starts = [0, *accumulate(shape.queries)]
    lengths = tuple(shape.cached + new for new in shape.queries)
    batch = Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        pages=Pages(
            torch.zeros(num_requests, table_width, dtype=torch.int32, device=device),
            torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        ),
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=max(shape.queries),
        max_seq_len=shape.max_seq_len,
        num_decode_requests=decodes,
        num_decode_tokens=decodes,
        host=HostLengths(starts, lengths),
    )
    return plan(model, batch)


@torch.inference_mode()
def run_batch(
    shape: BatchShape,
    model: DecoderForCausalLM | DraftModel,
    runtime: Runtime,
    table_width: int,
    announce: Callable[[Batch], AbstractContextManager[object]],
) -> None:
    """Run ``model`` on ``batch``; all ranks of a parallel group have to.

    Args:
        batch: see :func:`batches_to_serve`.
        model: loaded and finalized.
        runtime: what the model was built with.
        table_width: pages that the framework's table has for a request, which kernels are compiled for.
        announce: makes a step's batch known as the framework does, and gives what it passes through as ``step``.
    """
    device, num_tokens = runtime.device, sum(shape.queries)
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    rows = (num_tokens, model.config.hidden_size)
    with announce(metadata_of(shape, model, table_width, device)) as step:
        if isinstance(model, DraftModel):
            hidden = model(input_ids, positions, torch.zeros(rows, dtype=runtime.dtype, device=device), step)
        elif model.model.is_first:
            hidden = model(input_ids, positions, step)
        else:
            carried = Carried(*(torch.zeros(rows, dtype=runtime.dtype, device=device) for _ in range(2)))
            hidden = model(None, positions, step, carried=carried)
        if isinstance(hidden, torch.Tensor):
            model.logits(hidden[: len(shape.queries)])
