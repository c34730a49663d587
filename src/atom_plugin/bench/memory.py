"""The GPU memory that a step needs: all weights, and its requests' pages and states, with nothing to spare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from atom_core.config import GatedDeltaNetConfig, ModelConfig
from atom_plugin.bench.floor import STATE_BYTES, Request, decodes

#: Of the free memory; the rest is for activations and workspaces.
USABLE = 0.95


def first_page(cached: int, window: int | None, page_size: int) -> int:
    """The first page that a request with ``cached`` tokens and new ones reads: within its window, if any."""
    return 0 if window is None else max(0, cached + 1 - window) // page_size


def num_pages(request: Request, window: int | None, page_size: int) -> int:
    """The pages of a request from the first that it reads on."""
    return (request.length - 1) // page_size + 1 - first_page(request.cached, window, page_size)


def cache_memory(config: ModelConfig, requests: Sequence[Request], cache_dtype: torch.dtype, page_size: int) -> int:
    """Bytes of the pages and states of these requests, over all layers."""
    total = 0
    for layer in config.layers:
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNetConfig):
            total += (len(requests) + 1) * mixer.state_elements * STATE_BYTES
            continue
        pages = sum(num_pages(request, mixer.window, page_size) for request in requests)
        total += pages * page_size * mixer.cached_elements * cache_dtype.itemsize
    return total


def weight_memory(parameters: Sequence[torch.nn.Parameter], config: ModelConfig, max_model_len: int) -> int:
    """Bytes of all weights, of experts that no token is sent to as well, and of the rope table."""
    return sum(it.nbytes for it in parameters) + 4 * max_model_len * config.rope.rotary_dim


def why_too_large(
    config: ModelConfig,
    weights: int,
    batch: int,
    context: Sequence[int],
    cache_dtype: torch.dtype,
    page_size: int,
    free: int,
    chunks: Sequence[Request] = (),
) -> str | None:
    """None if the step fits in ``free`` bytes of GPU memory, else one line with what would.

    Args:
        config: the model.
        weights: bytes of :func:`weight_memory`.
        batch, context: the requests that decode, and their cached tokens in turns.
        cache_dtype, page_size: of the cache.
        free: bytes.
        chunks: the requests whose prompts are in the step.
    """

    def cache(requests: int, given: Sequence[int]) -> int:
        return cache_memory(config, (*decodes(requests, given), *chunks), cache_dtype, page_size)

    def fits(requests: int, given: Sequence[int]) -> bool:
        return weights + cache(requests, given) <= USABLE * free

    if fits(batch, context):
        return None
    named = " ".join(
        [
            *(["--batch", str(batch), *(f"--context {tokens}" for tokens in context)] if batch else []),
            *(f"--chunk {it.new}" for it in chunks),
            *(f"--chunk-context {it.cached}" for it in chunks[:1] if it.cached),
        ]
    )
    needed = f"{cache(batch, context) / 1e9:.1f} GB of cache and {weights / 1e9:.1f} GB of weights"
    line = f"{named}: {needed} do not fit in {free / 1e9:.1f} GB of free GPU memory; "
    if not fits(1 if batch else 0, (0,)):
        if not chunks:
            return f"{line}use fewer --layers, as the weights alone do not."
        return f"{line}use fewer --layers, or fewer and shorter chunks."
    requests = most(lambda number: fits(number, context), batch)
    offers = [f"--batch {requests}"] if requests >= len(context) else []
    if len(context) == 1 and fits(batch, (0,)):
        offers.append(f"--context {most(lambda tokens: fits(batch, (tokens,)), context[0])}")
    return f"{line}{' or '.join(offers)} would." if offers else f"{line}use a smaller --batch and less --context."


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, 0 if none does; what fits below it fits too."""
    least, beyond = 0, limit + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least
