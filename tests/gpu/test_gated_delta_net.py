"""Gated DeltaNet on this GPU: all cases, sizes of Qwen3-Next, and graphs that are replayed with other slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.gated_delta_net.hopper import HopperGatedDeltaDecode
from atom_core.kernels.gated_delta_net.reference import OneByOne, gated_delta_rule
from atom_core.kernels.gated_delta_net.triton_decode import TritonGatedDeltaDecode
from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps
from tests.gated_delta_cases import (
    FEW_CASES,
    PROMPT_CASES,
    DeltaCase,
    Request,
    check_delta,
    compared,
    delta_batch,
    drafted,
)

GPU = torch.device("cuda")
HERE = {
    "nvidia": torch.version.hip is None,
    "overlap": overlaps(Target.of(GPU)),
    "hopper": Target.of(GPU).arch == "sm90",
}
TRITON = {**HERE, "hopper": False}
QWEN = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
LARGE_FEW = (
    DeltaCase("64 requests", (Request(1), Request(1, has_state=False)) * 32, **QWEN, padded_requests=8),
    DeltaCase("drafts of 40 requests", drafted(4, 4) * 6, **QWEN, columns=4, drafts=True),
)
ONE_TOKEN = (
    LARGE_FEW[0],
    DeltaCase("one request", (Request(1),), **QWEN),
    DeltaCase("200 requests", (Request(1),) * 200, **QWEN),
    DeltaCase("padding", (Request(1), Request(1, has_state=False)) * 20, **QWEN, padded_requests=24, padded_tokens=24),
    DeltaCase("three value heads a key head", (Request(1),) * 40, **{**QWEN, "value_heads": 48}),
    DeltaCase("four value heads a key head", (Request(1),) * 40, **{**QWEN, "key_heads": 8}),
    DeltaCase("channels first", (Request(1), Request(1, has_state=False)) * 20, **QWEN, channels_first=True),
    DeltaCase(
        "copies", (Request(1, snapshot=1), Request(1), Request(1, False, snapshot=1)) * 20, **QWEN, snapshots=True
    ),
    DeltaCase("blocks", (Request(1), Request(1, has_state=False)) * 20, **QWEN, block_size=32, padded_requests=3),
    DeltaCase("behind drafts", (Request(1, accepted=2), Request(1, accepted=3)) * 20, **QWEN, columns=3, drafts=True),
)
LARGE_PROMPTS = (
    DeltaCase("a prompt of 500", (Request(500, has_state=False),), **QWEN),
    DeltaCase("many prompts", tuple(Request(20 * n + 1, n % 2 > 0, snapshot=7 * n) for n in range(1, 9)), **QWEN),
    DeltaCase(
        "decodes and a prompt", (Request(1),) * 20 + (Request(300),), **QWEN, decodes=20, snapshots=True, columns=2
    ),
)
DTYPES = pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
    ids=["bfloat16", "bfloat16 states", "float32"],
)


@DTYPES
@pytest.mark.parametrize("case", FEW_CASES + LARGE_FEW, ids=str)
def test_few_tokens(case, dtype, state_dtype):
    kernel = TritonGatedDeltaDecode(case.spec(dtype, state_dtype), **TRITON)
    check_delta(kernel, delta_batch(case, dtype, GPU, state_dtype))


@pytest.mark.skipif(not HERE["hopper"], reason="The kernel is for Hopper.")
@DTYPES
@pytest.mark.parametrize("case", ONE_TOKEN, ids=str)
def test_one_token_on_hopper(case, dtype, state_dtype):
    spec = case.spec(dtype, state_dtype)
    assert HopperGatedDeltaDecode.fits(spec)
    check_delta(HopperGatedDeltaDecode(spec, HERE["overlap"]), delta_batch(case, dtype, GPU, state_dtype))


@DTYPES
@pytest.mark.parametrize("case", PROMPT_CASES + LARGE_PROMPTS, ids=str)
def test_any_batch(case, dtype, state_dtype):
    kernel = TritonGatedDeltaNet(case.spec(dtype, state_dtype), **HERE)
    check_delta(kernel, delta_batch(case, dtype, GPU, state_dtype), times=10 if dtype == torch.float32 else 2)


#: As many tokens of each request as one that verifies has.
EVEN = Request(4, accepted=2, verifies=True)
#: With what a graph is captured, and what it is replayed with: batches of one shape.
REPLAYED = [
    *((case, case) for case in (*LARGE_FEW, LARGE_PROMPTS[0])),
    # A graph of decodes is replayed with prompts' last tokens, with new prompts, and the other way round.
    *(
        (
            DeltaCase(f"drafts, then {then}", (EVEN,) * 40, **QWEN, columns=4, drafts=True),
            DeltaCase(then, requests, **QWEN, columns=4, drafts=True),
        )
        for then, requests in {
            "other counts": tuple(replace(EVEN, accepted=1 + at % 4) for at in range(40)),
            "prompts' last tokens": (Request(4),) * 40,
            "some prompts' last and first tokens": (EVEN, Request(4), Request(4, has_state=False), EVEN) * 10,
            "new prompts padded with drafts": (replace(EVEN, accepted=1, has_state=False), EVEN) * 20,
        }.items()
    ),
    (
        DeltaCase("prompts' last tokens, then drafts", (Request(4),) * 40, **QWEN, columns=4, drafts=True),
        DeltaCase("drafts", (replace(EVEN, accepted=4),) * 40, **QWEN, columns=4, drafts=True),
    ),
]


@pytest.mark.parametrize(("case", "then"), REPLAYED, ids=[case.name for case, _ in REPLAYED])
def test_a_graph_is_replayed_with_other_slots(case, then):
    """Nothing that the host knows of a batch is in the graph: lengths, slots and states are those of each replay."""
    spec = case.spec(torch.bfloat16)
    kernel = TritonGatedDeltaNet(spec, **HERE)
    inputs = delta_batch(case, torch.bfloat16, GPU)
    inputs.run(kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.run(kernel)
    for seed in (1, 2):
        later = delta_batch(then, torch.bfloat16, GPU, seed=seed)
        batch, states = inputs.batch, inputs.batch.states
        pairs = [(inputs.qkvz, later.qkvz), (inputs.ba, later.ba), (batch.query_start_loc, later.batch.query_start_loc)]
        pairs += zip(inputs.cache.tensors, later.cache.tensors, strict=True)
        pairs += [(inputs.out, later.out), (batch.seq_lens, later.batch.seq_lens)]
        names = ("slots", "num_accepted", "verifies") if case.drafts else ("slots",)
        pairs += [(getattr(states, name), getattr(later.batch.states, name)) for name in names]
        weights = ("conv", "a_log", "dt_bias", "norm")
        pairs += [(getattr(inputs.weights, name), getattr(later.weights, name)) for name in weights]
        for kept, fresh in pairs:
            kept.copy_(fresh)
        expected = inputs.widened()
        expected.run(OneByOne(gated_delta_rule))
        graph.replay()
        compared(inputs, expected, times=2)


def test_more_requests_than_before_have_counters_of_their_own():
    """Also while a graph is captured, which makes them anew each time."""
    case = replace(LARGE_FEW[0], requests=(Request(1),) * 300)
    kernel = TritonGatedDeltaDecode(case.spec(torch.bfloat16), **TRITON)
    delta_batch(LARGE_FEW[0], torch.bfloat16, GPU).run(kernel)
    inputs = delta_batch(case, torch.bfloat16, GPU)
    graph = torch.cuda.CUDAGraph()
    expected = inputs.widened()
    expected.run(OneByOne(gated_delta_rule))
    with torch.cuda.graph(graph):
        inputs.run(kernel)
    graph.replay()
    compared(inputs, expected)
