"""What a token mixer is told of a step: which tokens belong to which request, and where the cache holds them.

``R`` requests, ``T`` tokens. Requests that decode (few query tokens each) come first. A padded row has no query
tokens; a padded token's slot is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class HostLengths:
    """What the host knows of a batch without asking the device."""

    starts: Sequence[int]
    """``R + 1``: as ``query_start_loc``."""
    lengths: Sequence[int]
    """``R``: as ``seq_lens``; exact for requests that are still in their prompt, and upper bounds for others."""


@dataclass(frozen=True)
class Pages:
    """Where the step's tokens lie in a paged cache."""

    table: torch.Tensor
    """int32 ``[R, max pages]``: the pages of each request, in order."""
    slots: torch.Tensor
    """int64 ``[T]``: where each new token is written: page * page size + offset; negative: nowhere."""


@dataclass(frozen=True)
class Snapshots:
    """Copies of states within a step, for prefix caches that keep a state at some of a request's tokens."""

    slots: torch.Tensor
    """int32 ``[R]``: the slot that a copy is written to; 0: there is none."""
    tokens: torch.Tensor
    """int32 ``[R]``: after how many of the request's new tokens; 0: there is none."""


@dataclass(frozen=True)
class Blocks:
    """Slots that are the blocks of a prefix cache: it keeps a state every ``size`` tokens of a request."""

    size: int
    num_slots: int
    """Of a request in a step: its own, that of the newest block, and behind it those for drafts."""


@dataclass(frozen=True)
class States:
    """Where the states of the requests lie, for mixers that keep one a request (Gated DeltaNet, arXiv 2412.06464).

    A request has a state if it has tokens from before the step (:attr:`Batch.seq_lens`); else it begins with zeros.
    Slot 0 belongs to no request, and is neither read nor written; neither is any slot of a row without new tokens.
    """

    slots: torch.Tensor
    """int32 ``[R, N]``, rows of any stride: column 0 has each request's own slot, the others are for drafts; see
    :attr:`verifies`. With :attr:`blocks` columns count from ``(seq_lens - 1) // blocks.size``."""
    num_accepted: torch.Tensor | None = None
    """int32 ``[R]``: how many tokens of the request's last step were accepted, at least 1; None: 1.

    Its state is read from the slot of column ``num_accepted - 1``, counted from its own, and its last inputs (of a
    convolution) from row ``num_accepted - 1`` on of its own slot.
    """
    verifies: torch.Tensor | None = None
    """bool ``[R]``: whether only some of the request's new tokens may be accepted; None: no request's.

    If so, the state after token ``t`` is written to column ``t``, and to its own slot all inputs from the one after
    which ``num_accepted = 1`` goes on. Else the state after the last token and the last inputs are written to its own.
    """
    snapshots: Snapshots | None = None
    blocks: Blocks | None = None
    """None: a request has as many slots as there are columns."""

    @property
    def num_slots(self) -> int:
        """Of a request."""
        return self.slots.shape[1] if self.blocks is None else self.blocks.num_slots

    def slots_of(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """int32 ``[R, num_slots]``: those of each request, its own first; ``seq_lens [R]`` is the batch's."""
        if self.blocks is None:
            return self.slots
        newest = (seq_lens - 1).clamp(min=0) // self.blocks.size
        columns = newest[:, None] + torch.arange(self.blocks.num_slots, device=seq_lens.device)
        return self.slots.gather(1, columns.long())

    def decoding(self, requests: int) -> States:
        """Those of the first requests."""
        return self._of(lambda it: it[:requests])

    def others(self, requests: int) -> States:
        """Those behind the first requests, in copies; none of them verifies."""
        # Copies, as kernels are compiled anew for pointers that are aligned otherwise.
        return replace(self._of(lambda it: it[requests:].clone()), verifies=None)

    def _of(self, part: Callable[[torch.Tensor], torch.Tensor]) -> States:
        copied = self.snapshots
        return States(
            part(self.slots),
            None if self.num_accepted is None else part(self.num_accepted),
            None if self.verifies is None else part(self.verifies),
            None if copied is None else Snapshots(part(copied.slots), part(copied.tokens)),
            self.blocks,
        )


NO_PAGES = Pages(torch.empty(0, 0, dtype=torch.int32), torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Batch:
    """One step's batch, in the one form that all token mixers and their kernels read."""

    query_start_loc: torch.Tensor
    """int32 ``[R + 1]``: request ``r`` has the tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1``."""
    seq_lens: torch.Tensor
    """int32 ``[R]``: tokens of each request after this step, cached and new."""
    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """An upper bound of ``seq_lens``; the host may not know it exactly."""
    num_decode_requests: int = 0
    num_decode_tokens: int = 0
    causal: bool = True
    pages: Pages = NO_PAGES
    """:data:`NO_PAGES` of a batch for mixers that keep a state for each request and no pages."""
    states: States | None = None
    """None: of a batch for mixers over pages."""
    host: HostLengths | None = None
    """None: it does not know, or a graph will replay the step with other lengths."""
    plans: Mapping[Hashable, object] = field(default_factory=dict)
    """What implementations worked out for this step, by their ``plan_key``."""
    scratch: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What the first layer's kernel worked out on the device for all others; another batch starts with an empty one."""

    def with_plans(self, plans: Mapping[Hashable, object]) -> Batch:
        """This step with ``plans``; it is the same batch, and its scratch too."""
        return _with(self, plans=plans)

    def with_slots(self, slots: torch.Tensor) -> Batch:
        """This step for layers whose states lie in ``slots``; see :attr:`States.slots`."""
        assert self.states is not None
        return _with(self, states=_with(self.states, slots=slots), scratch={})

    def decodes_and_others(self) -> tuple[Batch, Batch]:
        """The requests that decode, which come first, and those behind them, each as a batch of its own."""
        key = ("decodes and others", capturing(self.seq_lens.device))
        if key not in self.scratch:
            self.scratch[key] = self._decodes(), self._others()
        found: tuple[Batch, Batch] = self.scratch[key]
        return found

    def _decodes(self) -> Batch:
        requests, tokens = self.num_decode_requests, self.num_decode_tokens
        return replace(
            self,
            query_start_loc=self.query_start_loc[: requests + 1],
            seq_lens=self.seq_lens[:requests],
            pages=Pages(self.pages.table[:requests], self.pages.slots),
            states=None if self.states is None else self.states.decoding(requests),
            num_requests=requests,
            num_tokens=tokens,
            max_query_len=self._most_decoded(),
        )

    def _most_decoded(self) -> int:
        """An upper bound of the new tokens of a request that decodes."""
        requests, states = self.num_decode_requests, self.states
        if self.num_decode_tokens == requests:
            return 1
        if self.host is not None:
            return max(end - begin for begin, end in pairwise(self.host.starts[: requests + 1]))
        columns = 1 if states is None else states.num_slots
        # A request has as many slots as it may have tokens to verify.
        return min(self.max_query_len, columns) if columns > 1 else self.max_query_len

    def _others(self) -> Batch:
        requests, tokens = self.num_decode_requests, self.num_decode_tokens
        return replace(
            self,
            query_start_loc=self.query_start_loc[requests:] - tokens,
            # Copies, as kernels are compiled anew for pointers that are aligned otherwise.
            seq_lens=self.seq_lens[requests:].clone(),
            pages=Pages(self.pages.table[requests:].clone(), self.pages.slots[tokens:]),
            states=None if self.states is None else self.states.others(requests),
            num_requests=self.num_requests - requests,
            num_tokens=self.num_tokens - tokens,
            num_decode_requests=0,
            num_decode_tokens=0,
        )


@dataclass(frozen=True)
class BatchShape:
    """What the host knows of a batch, as a warm-up makes them up."""

    queries: tuple[int, ...]
    """New tokens of each request; requests that decode come first."""
    max_seq_len: int
    """An upper bound of any request's length."""
    cached: int = 0
    """Tokens of each request that are there already."""
    data_parallel_size: int = 1
    """Ranks that run the same batch, whose tokens all go through the experts of each."""
    decode_tokens: int = 1
    """New tokens that a request which decodes may have, as drafts are verified."""

    @cached_property
    def num_requests(self) -> int:
        """Requests of this rank."""
        return len(self.queries)

    @cached_property
    def num_tokens(self) -> int:
        """New tokens of this rank."""
        return sum(self.queries)

    @cached_property
    def max_query_len(self) -> int:
        """New tokens of the request that has the most."""
        return max(self.queries)

    @cached_property
    def num_decode_requests(self) -> int:
        """Requests that decode: those in front with few enough tokens."""
        return next((at for at, new in enumerate(self.queries) if new > self.decode_tokens), self.num_requests)

    @property
    def num_expert_tokens(self) -> int:
        """Tokens that go through the experts."""
        return self.num_tokens * self.data_parallel_size


def _with(it: T, **changed: Any) -> T:
    """``dataclasses.replace`` in a fifth of its time: a host makes a few batches a step while its GPU waits."""
    made: T = object.__new__(type(it))
    made.__dict__.update(it.__dict__)
    made.__dict__.update(changed)
    return made


def capturing(device: torch.device) -> bool:
    """Whether a graph is captured: what is made then is the graph's, and what was made before is not in it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
