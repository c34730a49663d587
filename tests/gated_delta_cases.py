"""Batches that every Gated DeltaNet kernel must compute correctly, beside the reference in float32.

The same cases run on a CPU under Triton's interpreter and on a GPU. What a kernel must not read is NaN: other slots,
states and inputs of requests that have none, and padding, whose rows have a slot as well. Nothing else than what the
reference writes may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from atom_core.batch import Batch, Blocks, Snapshots, States
from atom_core.cache import StateView
from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.reference import OneByOne, gated_delta_rule
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from tests.kernel_cases import NAN, TOLERANCE


@dataclass(frozen=True)
class Request:
    """One request of a batch."""

    tokens: int
    has_state: bool = True
    accepted: int = 1
    verifies: bool = False
    snapshot: int = 0
    """After how many of its new tokens its state is copied; 0: never."""


@dataclass(frozen=True)
class DeltaCase:
    """One layer and one batch."""

    name: str
    requests: tuple[Request, ...]
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    conv_width: int = 4
    columns: int = 1
    """Slots of a request."""
    drafts: bool = False
    """Whether the batch says how many tokens were accepted and which requests verify."""
    snapshots: bool = False
    """Whether the batch says which requests' states are copied."""
    separate: bool = False
    """Whether states of requests that verify go to tensors of their own."""
    block_size: int | None = None
    """Of a prefix cache's blocks; None: slots are none."""
    channels_first: bool = False
    """Of the convolution's inputs in memory."""
    decodes: int = 0
    padded_requests: int = 0
    padded_tokens: int = 0

    def __str__(self) -> str:
        return self.name

    def spec(self, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> GatedDeltaNetSpec:
        """What a kernel is built with."""
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv_width
        return GatedDeltaNetSpec(*sizes, dtype, state_dtype)


@dataclass(frozen=True)
class DeltaBatch:
    """A case's tensors."""

    qkvz: torch.Tensor
    ba: torch.Tensor
    weights: GatedDeltaNetWeights
    cache: StateView
    batch: Batch
    out: torch.Tensor
    num_real: int

    def run(self, kernel: Callable[..., None]) -> None:
        """Write to the outputs and the cache; ``kernel`` is called as a :class:`GatedDeltaNetKernel`."""
        kernel(self.qkvz, self.ba, self.weights, self.cache, self.batch, self.out)

    def widened(self) -> DeltaBatch:
        """A copy with everything in float32 but what the convolution keeps, which is as it is rounded."""
        weights, cache = self.weights, self.cache

        def wide(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (tensors[0].clone(), tensors[1].float().clone()) if tensors else ()

        return replace(
            self,
            qkvz=self.qkvz.float(),
            ba=self.ba.float(),
            weights=replace(weights, conv=weights.conv.float(), norm=weights.norm.float()),
            cache=StateView(wide(cache.tensors), wide(cache.unverified)),
            out=torch.full_like(self.out, NAN, dtype=torch.float32),
        )


def delta_batch(
    case: DeltaCase,
    dtype: torch.dtype,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
    conv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> DeltaBatch:
    """The tensors of ``case``; no ``conv_dtype`` is ``dtype``. Some tokens forget nearly all, as trained gates may."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    spec, requests = case.spec(dtype, state_dtype), case.requests
    counts = [it.tokens for it in requests]
    num_real, num_requests = sum(counts), len(requests) + case.padded_requests
    num_tokens, values = num_real + case.padded_tokens, spec.num_value_heads * spec.value_dim
    width = spec.channels + values
    qkvz, ba = random(num_tokens, width + 16), random(num_tokens, 2 * spec.num_value_heads + 16)
    ba[:, : 2 * spec.num_value_heads] += 30.0 * (torch.rand(num_tokens, 1, generator=generator) > 0.95)
    qkvz[num_real:] = ba[num_real:] = NAN
    weights = GatedDeltaNetWeights(
        (0.5 * random(spec.channels, spec.conv_width)).to(dtype).to(device),
        random(spec.num_value_heads).abs().to(device),
        random(spec.num_value_heads).to(device),
        (1.0 + 0.1 * random(spec.value_dim)).to(dtype).to(device),
        1e-6,
    )

    num_slots = (num_requests + 2) * (case.columns + 1) + 1
    order = (torch.randperm(num_slots - 1, generator=generator) + 1).to(torch.int32)
    unused = order[-1]
    table = torch.full((num_requests, case.columns + 1), unused, dtype=torch.int32)
    table[: len(requests)] = order[: len(requests) * (case.columns + 1)].view(len(requests), -1)
    slots, copies = table[:, : case.columns], table[:, -1].clone()
    rows = spec.conv_width - 1 + case.columns - 1
    if case.channels_first:
        stored = torch.full((num_slots, 2, spec.channels, rows), NAN)
        conv = stored.to(conv_dtype or dtype).to(device)[:, 1].transpose(1, 2)
    else:
        conv = torch.full((num_slots, rows + 1, spec.channels + 32), NAN).to(conv_dtype or dtype).to(device)
        conv = conv[:, :rows, : spec.channels]
    inner = spec.num_value_heads * spec.value_dim * spec.key_dim
    recurrent = torch.full((num_slots, inner + 64), NAN).to(state_dtype).to(device)[:, :inner]
    recurrent = recurrent.unflatten(1, (spec.num_value_heads, spec.value_dim, spec.key_dim))
    for row, it in enumerate(requests):
        if it.has_state:
            first = it.accepted - 1
            conv[slots[row, 0], first : first + spec.conv_width - 1] = (
                random(spec.conv_width - 1, spec.channels).to(conv.dtype).to(device)
            )
            recurrent[slots[row, first]] = (0.3 * random(*recurrent.shape[1:])).to(state_dtype).to(device)
    unverified: tuple[torch.Tensor, ...] = ()
    if case.separate:
        most = max(counts)
        unverified = (
            torch.full((num_requests, spec.conv_width - 2 + most, spec.channels), NAN).to(conv.dtype).to(device),
            torch.full((num_requests, most, *recurrent.shape[1:]), NAN).to(state_dtype).to(device),
        )

    def told(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values + [0] * case.padded_requests, dtype=dtype, device=device)

    lengths = told([it.tokens + 100 * it.has_state for it in requests], torch.int32)
    states = States(slots.to(device))
    if case.block_size is not None:
        newest = (lengths.cpu() - 1).clamp(min=0) // case.block_size
        table = torch.full((num_requests, int(newest.max()) + case.columns + 1), unused, dtype=torch.int32)
        for row, column in enumerate(newest.tolist()):
            table[row, column : column + case.columns] = slots[row]
        states = States(table.to(device), blocks=Blocks(case.block_size, case.columns))
    if case.drafts:
        accepted, verifies = [it.accepted for it in requests], [it.verifies for it in requests]
        states = replace(states, num_accepted=told(accepted, torch.int32), verifies=told(verifies, torch.bool))
    if case.snapshots:
        copied = told([it.snapshot for it in requests], torch.int32)
        states = replace(states, snapshots=Snapshots(torch.where(copied > 0, copies.to(device), 0), copied))
    starts = [0, *accumulate(counts)] + [num_real] * case.padded_requests
    batch = Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=lengths,
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=max(counts),
        max_seq_len=max(counts) + 100,
        num_decode_requests=case.decodes,
        num_decode_tokens=sum(counts[: case.decodes]),
        states=states,
    )
    qkvz, ba = qkvz.to(dtype).to(device)[:, :width], ba.to(dtype).to(device)[:, : 2 * spec.num_value_heads]
    out = torch.full((num_tokens, spec.num_value_heads, spec.value_dim), NAN, dtype=dtype, device=device)
    return DeltaBatch(qkvz, ba, weights, StateView((conv, recurrent), unverified), batch, out, num_real)


def check_delta(kernel: Callable[..., None], inputs: DeltaBatch, times: float = 1.0) -> tuple[float, float]:
    """Run ``kernel``, and compare outputs and all of the cache with the reference in float32.

    ``times``: more than once what their dtypes allow. Returns the largest differences, as shares of the largest number.
    """
    expected = inputs.widened()
    expected.run(OneByOne(gated_delta_rule))
    with fresh_memory_of_nan():
        inputs.run(kernel)
    return compared(inputs, expected, times)


@contextmanager
def fresh_memory_of_nan() -> Iterator[None]:
    """Have ``torch.empty`` and its like give NaN, as PyTorch does for deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compared(inputs: DeltaBatch, expected: DeltaBatch, times: float = 1.0) -> tuple[float, float]:
    """See :func:`check_delta`."""
    num_real = inputs.num_real
    assert inputs.out[num_real:].isnan().all(), "rows of padding were written"
    pairs = list(zip(inputs.cache.tensors + inputs.cache.unverified, _tensors(expected.cache), strict=True))
    for found, wanted in pairs[::2]:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    shares = [_difference(inputs.out[:num_real], expected.out[:num_real], inputs.qkvz.dtype, times)]
    for found, wanted in pairs[1::2]:
        assert torch.equal(found.isnan(), wanted.isnan()), "other states were written"
        coarse = max(inputs.qkvz.dtype, found.dtype, key=TOLERANCE.__getitem__)
        shares.append(_difference(found.nan_to_num(), wanted.nan_to_num(), coarse, times))
    return shares[0], max(shares[1:])


def _tensors(cache: StateView) -> tuple[torch.Tensor, ...]:
    return cache.tensors + cache.unverified


def _difference(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, times: float) -> float:
    share = ((found.float() - wanted).abs().max() / wanted.abs().max()).item()
    allowed = times * TOLERANCE[dtype]
    assert share <= allowed, f"differs by {share:.3g} of the largest number, allowed {allowed:.3g}"  # a NaN fails too
    return share


_ONE = Request(1)
_NEW = Request(1, has_state=False)


def drafted(tokens: int, columns: int) -> tuple[Request, ...]:
    """Requests that verify ``tokens``, behind steps that accepted any number of them, and others among them."""
    verifying = [Request(tokens, accepted=accepted, verifies=True) for accepted in range(1, columns + 1)]
    return (*verifying, Request(tokens, accepted=columns), Request(tokens, has_state=False), Request(1, accepted=2))


#: Few tokens a request.
FEW_CASES = (
    DeltaCase("one token each", (_ONE, _NEW, _ONE)),
    DeltaCase("one request", (_ONE,), padded_requests=3, padded_tokens=4),
    DeltaCase("key heads that are not shared", (_ONE, _NEW), value_heads=2),
    DeltaCase("three value heads a key head", (_ONE, _NEW), value_heads=6),
    DeltaCase("two to eight tokens", tuple(Request(n, n % 3 > 0) for n in range(2, 9))),
    DeltaCase("channels first", (_ONE, Request(3), _NEW), channels_first=True),
    DeltaCase("odd sizes", (_ONE, _NEW, Request(3)), key_dim=24, value_dim=40),
    DeltaCase("wider keys than values", (_ONE, _NEW, Request(2)), key_dim=64, value_dim=32),
    DeltaCase("128 keys and values", (_ONE, Request(2)), key_heads=1, value_heads=2, key_dim=128, value_dim=128),
    DeltaCase("a convolution of two", (_ONE, _NEW, Request(2)), conv_width=2),
    DeltaCase("a convolution of three", (_ONE, _NEW, Request(2)), conv_width=3),
    DeltaCase("two tokens verified", drafted(2, 2), columns=2, drafts=True, padded_requests=2),
    DeltaCase("four tokens verified", drafted(4, 4), columns=4, drafts=True, padded_tokens=3),
    DeltaCase("verified, channels first", drafted(3, 3), columns=3, drafts=True, channels_first=True),
    DeltaCase("verified, 128 values", drafted(2, 2), columns=2, drafts=True, key_dim=64, value_dim=128),
    DeltaCase("verified, a convolution of two", drafted(3, 3), columns=3, drafts=True, conv_width=2),
    DeltaCase("blocks of a prefix cache", (_ONE, _NEW, Request(3)), block_size=32, padded_requests=2),
    DeltaCase("blocks, verified", drafted(3, 3), columns=3, drafts=True, block_size=48, padded_requests=1),
    DeltaCase("verified, kept apart", drafted(3, 3), columns=3, drafts=True, separate=True),
    DeltaCase(
        "copies",
        (Request(1, snapshot=1), _ONE, Request(4, snapshot=2), Request(3, False, snapshot=1), Request(2, snapshot=2)),
        snapshots=True,
        padded_requests=1,
    ),
    DeltaCase(
        "copies while verifying",
        (Request(3, verifies=True, accepted=2, snapshot=2), Request(3, verifies=True), Request(2, snapshot=1)),
        columns=3,
        drafts=True,
        snapshots=True,
    ),
)

#: Prompts: more tokens than the kernel of few takes.
PROMPT_CASES = (
    DeltaCase("one prompt", (Request(65, False),)),
    DeltaCase(
        "lengths at chunk borders", tuple(Request(n, n % 2 > 0) for n in (1, 2, 3, 4, 63, 64, 65, 127, 128, 200))
    ),
    DeltaCase("padding", (Request(70), Request(9, False)), padded_requests=3, padded_tokens=70),
    DeltaCase("blocks of a prefix cache", (Request(70), Request(9, False)), block_size=32, padded_requests=2),
    DeltaCase("key heads that are not shared", (Request(70, False), Request(9)), value_heads=2),
    DeltaCase("three value heads a key head", (Request(70), Request(9, False)), value_heads=6),
    DeltaCase("channels first", (Request(70), Request(2), Request(9, False)), channels_first=True),
    DeltaCase("odd sizes", (Request(70), Request(9, False)), key_dim=24, value_dim=40),
    DeltaCase("wider keys than values", (Request(70), Request(9, False)), key_dim=64, value_dim=32),
    DeltaCase("128 keys and values", (Request(70), Request(9, False)), 1, 2, 128, 128),
    DeltaCase("a convolution of two", (Request(70), Request(1), Request(9, False)), conv_width=2),
    DeltaCase("behind accepted drafts", (Request(70, accepted=3), Request(9, accepted=2)), columns=3, drafts=True),
    DeltaCase(
        "decodes in front",
        (_ONE, _NEW, _ONE, Request(70), Request(9, False), Request(1, False)),
        decodes=3,
        padded_requests=1,
        padded_tokens=2,
    ),
    DeltaCase(
        "drafts in front",
        (*drafted(3, 3), Request(70), Request(9, False)),
        columns=3,
        drafts=True,
        decodes=6,
        snapshots=True,
        padded_requests=1,
    ),
    DeltaCase(
        "copies within chunks, at their ends and none",
        (
            *(Request(200, n % 2 > 0, snapshot=n) for n in (1, 2, 63, 64, 65, 128, 192, 199, 200)),
            Request(70),
            Request(2, snapshot=1),
            Request(64, snapshot=64),
        ),
        snapshots=True,
        padded_requests=1,
    ),
)
