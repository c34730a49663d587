"""One run for each kind of batch that a model will serve, so that no request waits for a kernel to be compiled.

Kernels say for which batches they are compiled anew (:mod:`atom_core.kernels.compile_keys`). Of all batches that an
engine can make, the few are run that have all compile keys between them. Nothing is written to the cache, and what is
read from it is the page of number 0, of states nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from atom_core.batch import Batch, BatchShape, Blocks, HostLengths, Pages, Snapshots, States
from atom_core.cache import StateSpec
from atom_core.kernels.attention.long_prompts import MIN_PROMPT
from atom_core.kernels.compile_keys import CompileKeys
from atom_core.mixers.base import TokenMixer
from atom_core.models.decoder import Carried, DecoderForCausalLM
from atom_core.models.draft import DraftModel
from atom_core.runtime import Runtime
from atom_core.standalone import mixers, plan

#: Tokens of a prompt at most, for kernels of many tokens do not change with lengths; and of one beside other requests.
_LONGEST_PROMPT, _PROMPT = 2048, 257
#: New tokens behind cached ones, up to more than any kernel of few takes, and cached tokens: enough that attention over
#: latents does not expand them.
_MOST_FEW_TOKENS, _CACHED = 16, 64


@dataclass(frozen=True)
class StateKind:
    """Which of :class:`States` a framework's batches have: kernels are compiled for each kind."""

    slots: int = 1
    """Of a request."""
    counts_accepted: bool = False
    verifies: bool = False
    copies: bool = False
    """For prefix caches."""
    block_size: int | None = None
    """Of :class:`Blocks`; None: there are none."""


#: Of batches whose requests verify nothing and of which nothing is copied.
PLAIN = StateKind()


def batches_to_serve(
    model: torch.nn.Module,
    runtime: Runtime,
    max_requests: int,
    max_tokens: int,
    max_seq_len: int,
    decode_tokens: int = 1,
) -> list[BatchShape]:
    """Batches that have all compile keys of the model's kernels, and one of each kind for libraries that state none.

    Args:
        model: a network; its weights need not be there.
        runtime: what it was built with.
        max_requests, max_tokens, max_seq_len: of any batch, and of any request in it.
        decode_tokens: see :class:`BatchShape`.
    """

    def possible(shapes: Iterator[BatchShape]) -> Iterator[BatchShape]:
        size = runtime.data_parallel.world_size
        for shape in shapes:
            fits = shape.num_requests <= max_requests and shape.num_tokens <= max_tokens
            if fits and shape.max_query_len + shape.cached <= shape.max_seq_len <= max_seq_len:
                yield replace(shape, data_parallel_size=size, decode_tokens=decode_tokens)

    found = list(dict.fromkeys(possible(_kinds(max_requests, max_tokens, max_seq_len))))
    candidates = possible(_candidates(max_requests, max_tokens, max_seq_len))
    return _with_all_keys(found, candidates, _compile_keys(model, runtime))


def batches_to_verify(
    model: torch.nn.Module, runtime: Runtime, max_requests: int, max_seq_len: int, tokens: int
) -> list[BatchShape]:
    """Batches whose requests have ``tokens`` each, with all compile keys of kernels over states.

    For a framework that verifies drafts in batches of their own: other kernels do not tell these from batches of
    :func:`batches_to_serve`.
    """
    size = runtime.data_parallel.world_size
    shapes = [BatchShape((tokens,) * count, max_seq_len, 0, size) for count in _sizes(max_requests)]
    states = [it for it in _layers(model) if isinstance(it.cache_spec, StateSpec)]
    return _with_all_keys([], iter(shapes), lambda shape: _keys_of_layers(states, shape, runtime.device))


def _with_all_keys(
    found: list[BatchShape],
    shapes: Iterator[BatchShape],
    keys_of: Callable[[BatchShape], frozenset[Hashable]],
) -> list[BatchShape]:
    """``found``, and as few of ``shapes`` as have all keys with them."""
    candidates: dict[frozenset[Hashable], BatchShape] = {}
    for shape in shapes:
        candidates.setdefault(keys_of(shape), shape)
    missing = frozenset[Hashable]().union(*candidates).difference(*map(keys_of, found))
    while missing:
        keys = max(candidates, key=lambda it: len(it & missing))
        found.append(candidates[keys])
        missing -= keys
    return found


def _compile_keys(model: torch.nn.Module, runtime: Runtime) -> Callable[[BatchShape], frozenset[Hashable]]:
    """What the model's kernels are compiled for when they run a batch."""
    kernels = [kernel for kernel in runtime.kernels.kernels() if isinstance(kernel, CompileKeys)]
    layers = _layers(model)

    def keys_of(shape: BatchShape) -> frozenset[Hashable]:
        device = runtime.device
        keys = [(id(kernel), key) for kernel in kernels for key in kernel.compile_keys(shape, device)]
        return frozenset(keys) | _keys_of_layers(layers, shape, device)

    return keys_of


def _layers(model: torch.nn.Module) -> list[TokenMixer]:
    """One of each shape, for those of one shape share what is compiled."""
    return list({(type(it), it.cache_spec, it.heads, it.query_dim, it.scale): it for it in mixers(model)}.values())


def _keys_of_layers(layers: Sequence[TokenMixer], shape: BatchShape, device: torch.device) -> frozenset[Hashable]:
    return frozenset[Hashable]().union(*(it.attention_compile_keys(shape, device) for it in layers))


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
    # FlashAttention 3 may run batches with longer prompts, and our kernel as many tokens in these.
    short = min(MIN_PROMPT - 1, max_seq_len)
    for requests in range(1, max_tokens // short + 1):
        yield BatchShape((short,) * requests, max_seq_len)
        yield BatchShape((short,) * requests, short)
    for tokens in _sizes(max_tokens):
        prompts = _prompts(tokens, max_seq_len)
        yield BatchShape(prompts, max_seq_len)
        # Attention to cached tokens may have other tiles.
        yield BatchShape(prompts, max(prompts))


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
    states: StateKind = PLAIN,
) -> Batch:
    """A batch of ``shape``, planned for ``model``: no token and no request has a slot, and all pages are page 0."""
    num_requests, num_tokens, decodes = shape.num_requests, shape.num_tokens, shape.num_decode_requests
    starts = [0, *accumulate(shape.queries)]
    lengths = tuple(shape.cached + new for new in shape.queries)
    batch = Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        pages=Pages(
            torch.zeros(num_requests, table_width, dtype=torch.int32, device=device),
            torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        ),
        states=_no_states(lengths, states, device) if keeps_states(model) else None,
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=shape.max_query_len,
        max_seq_len=shape.max_seq_len,
        num_decode_requests=decodes,
        num_decode_tokens=sum(shape.queries[:decodes]),
        host=HostLengths(starts, lengths),
    )
    return plan(model, batch)


def keeps_states(model: DecoderForCausalLM | DraftModel) -> bool:
    """Whether a mixer keeps a state a request."""
    return any(isinstance(it.cache_spec, StateSpec) for it in mixers(model))


def _no_states(lengths: Sequence[int], kind: StateKind, device: torch.device) -> States:
    """Slot 0 for each request of so many tokens: nothing is read or written."""
    num_requests, columns = len(lengths), kind.slots
    if kind.block_size is not None:
        columns += (max(lengths) - 1) // kind.block_size

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return States(
        slots=zeros(num_requests, columns),
        num_accepted=zeros(num_requests) + 1 if kind.counts_accepted else None,
        verifies=zeros(num_requests, dtype=torch.bool) if kind.verifies else None,
        snapshots=Snapshots(zeros(num_requests), zeros(num_requests)) if kind.copies else None,
        blocks=None if kind.block_size is None else Blocks(kind.block_size, kind.slots),
    )


@torch.no_grad()  # in inference mode, what kernels keep could not be written to outside of it
def run_batch(
    shape: BatchShape,
    model: DecoderForCausalLM | DraftModel,
    runtime: Runtime,
    table_width: int,
    announce: Callable[[Batch], AbstractContextManager[object]],
    states: StateKind = PLAIN,
    id_dtype: torch.dtype = torch.int32,
) -> None:
    """Run ``model`` on a batch of ``shape``; all ranks of a parallel group have to.

    Args:
        shape: see :func:`batches_to_serve`.
        model: loaded and finalized.
        runtime: what the model was built with.
        table_width: pages that the framework's table has for a request, which kernels are compiled for.
        announce: makes a step's batch known as the framework does, and gives what it passes through as ``step``.
        states: what the framework's batches have of a request's states.
        id_dtype: of tokens.
    """
    device, num_tokens = runtime.device, shape.num_tokens
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    input_ids = torch.zeros(num_tokens, dtype=id_dtype, device=device)
    rows = (num_tokens, model.config.hidden_size)
    with announce(batch_of(shape, model, table_width, device, states)) as step:
        if isinstance(model, DraftModel):
            hidden = model(input_ids, positions, torch.zeros(rows, dtype=runtime.dtype, device=device), step)
        elif model.model.is_first:
            hidden = model(input_ids, positions, step)
        else:
            carried = Carried(*(torch.zeros(rows, dtype=runtime.dtype, device=device) for _ in range(2)))
            hidden = model(None, positions, step, carried=carried)
        if isinstance(hidden, torch.Tensor):
            model.logits(hidden[: shape.num_requests])
