"""A timed step: requests that decode, chunks of prompts behind them, their pages in any order, and the model's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from atom_core.batch import Batch, HostLengths, Pages, States
from atom_core.cache import Cache
from atom_core.config import ModelConfig
from atom_core.mixers.base import TokenMixer
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.runtime import Runtime
from atom_core.standalone import empty_caches, plan
from atom_plugin.bench.floor import Request
from atom_plugin.bench.memory import first_page, num_pages

PAGE_SIZE = 16
#: Graphs are captured for sequences of up to this many tokens, as in an engine, or of as many as a longer request has.
MAX_MODEL_LEN = 4096


def step_batch(
    requests: Sequence[Request],
    device: torch.device,
    seed: int = 0,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    window: int | None = None,
    page_size: int = PAGE_SIZE,
) -> tuple[Batch, int]:
    """The batch of these requests, of which those that decode come first, and its number of pages.

    With chunks of prompts the host knows all lengths, as in an engine, which runs such a step in no full graph.

    Args:
        requests: of the step.
        device: of the tensors.
        seed: of the order of pages.
        max_model_len: the longest sequence that a graph of the step is for.
        window: of the layers. Pages before it are page 0, as vLLM's are, and nobody reads them.
        page_size: tokens of a page.
    """
    longest = max(it.length for it in requests)
    assert longest <= max_model_len, f"a sequence of {longest} tokens, of at most {max_model_len}"
    decoding = [it for it in requests if it.new == 1]
    assert list(requests[: len(decoding)]) == decoding, "requests that decode come first"
    generator = torch.Generator().manual_seed(seed)
    counts = [num_pages(it, window, page_size) for it in requests]
    table = torch.zeros(len(requests), -(-max_model_len // page_size), dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=generator).int()
    slots = []
    for row, it, pages in zip(table, requests, torch.split(order, counts), strict=True):
        row[first_page(it.cached, window, page_size) : (it.length - 1) // page_size + 1] = pages
        new = torch.arange(it.cached, it.length)
        slots.append(row[new // page_size].long() * page_size + new % page_size)
    lengths, starts = [it.length for it in requests], [0, *accumulate(it.new for it in requests)]
    whole = len(decoding) == len(requests)
    states = torch.randperm(len(requests), generator=generator).int() + 1
    made = Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        pages=Pages(table.to(device), torch.cat(slots).to(device)),
        num_requests=len(requests),
        num_tokens=starts[-1],
        max_query_len=max(it.new for it in requests),
        max_seq_len=max_model_len if whole else longest,
        num_decode_requests=len(decoding),
        num_decode_tokens=len(decoding),
        states=States(states.to(device)[:, None]),
        host=None if whole else HostLengths(starts, lengths),
    )
    return made, sum(counts)


@dataclass(frozen=True)
class TimedStep:
    """See :class:`atom_core.mixers.base.Step`; layers of the same window share a batch."""

    batches: Mapping[int | None, Batch]
    caches: Mapping[int, Cache]

    def lookup(self, mixer: TokenMixer) -> tuple[Batch, Cache]:
        """See :meth:`atom_core.mixers.base.Step.lookup`."""
        return self.batches[getattr(mixer.cache_spec, "window", None)], self.caches[mixer.layer_index]


def stepping(
    model: DecoderForCausalLM,
    config: ModelConfig,
    runtime: Runtime,
    requests: Sequence[Request],
    page_size: int = PAGE_SIZE,
) -> Callable[[], None]:
    """A step from token ids to the argmax token of each request's last token; see :func:`step_batch`."""
    device = runtime.device
    batches, pages = {}, {}
    for window in dict.fromkeys(layer.mixer.window for layer in config.layers):
        batch, pages[window] = step_batch(
            requests, device, max_model_len=runtime.max_model_len, window=window, page_size=page_size
        )
        batches[window] = plan(model, batch)
    step = TimedStep(batches, empty_caches(model, runtime, pages, page_size, len(requests), random=True))
    ids = torch.randint(config.vocab_size, (sum(it.new for it in requests),), device=device)
    positions = torch.cat([torch.arange(it.cached, it.length, device=device) for it in requests])
    last = torch.tensor([it.new for it in requests], device=device).cumsum(0) - 1
    chosen = torch.empty(len(requests), dtype=torch.int64, device=device)
    only_decodes = len(ids) == len(requests)

    def run() -> None:
        hidden = model(ids, positions, step)
        torch.argmax(model.logits(hidden if only_decodes else hidden[last]), -1, out=chosen)

    return run
