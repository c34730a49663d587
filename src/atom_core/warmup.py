"""One run for each kind of batch that a model will serve, so that no request waits for a kernel to be compiled.

Kernels say for which batches they are compiled anew (:mod:`atom_core.kernels.compile_keys`). Of all batches that an
engine can make, the few are run that have all compile keys between them. Nothing is written to the cache, and what is
read from it is the page of number 0, of states nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate

import torch

from atom_core.batch import Batch, BatchShape, HostLengths, Pages, States
from atom_core.cache import StateSpec
from atom_core.kernels.compile_keys import CompileKeys
from atom_core.models.decoder import Carried, DecoderForCausalLM
from atom_core.models.draft import DraftModel
from atom_core.runtime import Runtime
from atom_core.standalone import mixers, plan

#: Tokens of a prompt at most, for kernels of many tokens do not change with lengths; and of one beside other requests.
_LONGEST_PROMPT, _PROMPT = 2048, 257
#: New tokens behind cached ones, up to more than any kernel of few takes, and cached tokens: enough that attention over
#: latents does not expand them.
_MOST_FEW_TOKENS, _CACHED = 16, 64


def batches_to_serve(
    model: torch.nn.Module, runtime: Runtime, max_requests: int, max_tokens: int, max_seq_len: int
) -> list[BatchShape]:
    """Batches that have all compile keys of the model's kernels, and one of each kind for libraries that state none.

    Args:
        model: a network; its weights need not be there.
        runtime: what it was built with.
        max_requests, max_tokens, max_seq_len: of any batch, and of any request in it.
    """

    def possible(shapes: Iterator[BatchShape]) -> Iterator[BatchShape]:
        size = runtime.data_parallel.world_size
        for shape in shapes:
            fits = shape.num_requests <= max_requests and shape.num_tokens <= max_tokens
            if fits and shape.max_query_len + shape.cached <= shape.max_seq_len <= max_seq_len:
                yield replace(shape, data_parallel_size=size)

    keys_of = _compile_keys(model, runtime)
    candidates: dict[frozenset[Hashable], BatchShape] = {}
    for shape in possible(_candidates(max_requests, max_tokens, max_seq_len)):
        candidates.setdefault(keys_of(shape), shape)
    found = list(dict.fromkeys(possible(_kinds(max_requests, max_tokens, max_seq_len))))
    missing = frozenset[Hashable]().union(*candidates).difference(*map(keys_of, found))
    while missing:
        keys = max(candidates, key=lambda it: len(it & missing))
        found.append(candidates[keys])
        missing -= keys
    return found


def _compile_keys(model: torch.nn.Module, runtime: Runtime) -> Callable[[BatchShape], frozenset[Hashable]]:
    """What the model's kernels are compiled for when they run a batch."""
    kernels = [kernel for kernel in runtime.kernels.kernels() if isinstance(kernel, CompileKeys)]
    # Layers of one shape share what is compiled.
    layers = {(type(it), it.cache_spec, it.heads, it.query_dim, it.scale): it for it in mixers(model)}

    def keys_of(shape: BatchShape) -> frozenset[Hashable]:
        device = runtime.device
        keys = [(id(kernel), key) for kernel in kernels for key in kernel.compile_keys(shape, device)]
        return frozenset(keys).union(*(it.attention_compile_keys(shape, device) for it in layers.values()))

    return keys_of


def _kinds(max_requests: int, max_tokens: int, max_seq_len: int) -> Iterator[BatchShape]:
    """One decode and ``max_requests`` of them, a prompt by itself and after decodes, and ``max_tokens`` of prompts."""
    prompt = max(1, min(_PROMPT, max_tokens - 2, max_seq_len))
    for queries in ((1,), (1,) * max_requests, (prompt,), (1, 1, prompt)):
        yield BatchShape(queries, max_seq_len)
    yield BatchShape(_prompts(max_tokens, max_seq_len), max_seq_len)


def _candidates(max_requests: int, max_tokens: int, max_seq_len: int) -> Iterator[BatchShape]:
    """Decodes, few tokens behind cached ones, both beside a prompt, and prompts, of all sizes; small batches first."""
    prompt = max(1, min(_PROMPT, max_tokens // 2, max_seq_len - _CACHED))
    for new in range(1, _MOST_FEW_TOKENS + 1):
        for requests in _sizes(min(max_requests, max_tokens // new)):
            queries = (new,) * requests
            yield BatchShape(queries, max_seq_len, _CACHED)
            yield BatchShape((*(1,) * (requests - 1), new), max_seq_len, _CACHED)
            # Where requests are short, no kernel shares out their keys.
            yield BatchShape(queries, 2 * new, new)
            yield BatchShape((*queries, prompt), max_seq_len, _CACHED)
            yield BatchShape((*queries, prompt), max_seq_len)
    for tokens in _sizes(max_tokens):
        yield BatchShape(_prompts(tokens, max_seq_len), max_seq_len)


def _sizes(most: int) -> Iterator[int]:
    """All numbers up to 256, then multiples of 16, which Triton may compile anew for, and the numbers after them."""
    return (size for size in range(1, most + 1) if size <= 256 or size % 16 <= 1)


def _prompts(tokens: int, max_seq_len: int) -> tuple[int, ...]:
    """So many tokens of prompts."""
    longest = min(_LONGEST_PROMPT, max_seq_len)
    whole, rest = divmod(tokens, longest)
    return (longest,) * whole + (rest,) * (rest > 0)


def batch_of(
    shape: BatchShape,
    model: DecoderForCausalLM | DraftModel,
    table_width: int,
    device: torch.device,
    num_drafts: int = 0,
) -> Batch:
    """A batch of ``shape``, planned for ``model``: no token and no request has a slot, and all pages are page 0."""
    num_requests, num_tokens = shape.num_requests, shape.num_tokens
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
        states=_no_states(num_requests, num_drafts, device) if _keeps_states(model) else None,
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=shape.max_query_len,
        max_seq_len=shape.max_seq_len,
        num_decode_requests=decodes,
        num_decode_tokens=decodes,
        host=HostLengths(starts, lengths),
    )
    return plan(model, batch)


def _keeps_states(model: DecoderForCausalLM | DraftModel) -> bool:
    """Whether a mixer keeps a state a request."""
    return any(isinstance(it.cache_spec, StateSpec) for it in mixers(model))


def _no_states(num_requests: int, num_drafts: int, device: torch.device) -> States:
    """Slot 0 for each: nothing is read or written. Kernels are compiled for what else there is of a batch's states."""
    numbers, flags = (torch.zeros(num_requests, dtype=dtype, device=device) for dtype in (torch.int32, torch.bool))
    slots = torch.zeros(num_requests, 1 + num_drafts, dtype=torch.int32, device=device)
    return States(slots, flags, numbers + 1, flags.clone()) if num_drafts else States(slots, flags)


@torch.inference_mode()
def run_batch(
    shape: BatchShape,
    model: DecoderForCausalLM | DraftModel,
    runtime: Runtime,
    table_width: int,
    announce: Callable[[Batch], AbstractContextManager[object]],
    num_drafts: int = 0,
) -> None:
    """Run ``model`` on a batch of ``shape``; all ranks of a parallel group have to.

    Args:
        shape: see :func:`batches_to_serve`.
        model: loaded and finalized.
        runtime: what the model was built with.
        table_width: pages that the framework's table has for a request, which kernels are compiled for.
        announce: makes a step's batch known as the framework does, and gives what it passes through as ``step``.
        num_drafts: tokens that may be drafted for a request, and so states that a request may have.
    """
    device, num_tokens = runtime.device, shape.num_tokens
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    rows = (num_tokens, model.config.hidden_size)
    with announce(batch_of(shape, model, table_width, device, num_drafts)) as step:
        if isinstance(model, DraftModel):
            hidden = model(input_ids, positions, torch.zeros(rows, dtype=runtime.dtype, device=device), step)
        elif model.model.is_first:
            hidden = model(input_ids, positions, step)
        else:
            carried = Carried(*(torch.zeros(rows, dtype=runtime.dtype, device=device) for _ in range(2)))
            hidden = model(None, positions, step, carried=carried)
        if isinstance(hidden, torch.Tensor):
            model.logits(hidden[: shape.num_requests])
