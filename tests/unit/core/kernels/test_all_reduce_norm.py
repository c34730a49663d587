"""The sum over ranks with the norm behind it, over memory that ranks share on a CPU."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
import torch
from torch import multiprocessing

from atom_core.kernels import kernel_set
from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec
from atom_core.kernels.all_reduce_norm.peer_memory import PROGRAMS, SHARES, SIZE, Peers
from atom_core.kernels.all_reduce_norm.reference import all_reduce_norm as reference
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Implementation, Target, always
from atom_core.runtime import SingleRank

EPS = 1e-5
H200 = Target("cuda", "sm90")
#: Ranks, rows and their sizes: one row, some, more than there are programs, and an odd size.
SHAPES = [(2, 1, 64), (3, 3, 72), (8, 3, 72), (2, PROGRAMS + 7, 24), (8, 2, 37)]


def memory_of(world_size: int) -> list[torch.Tensor]:
    """What each rank allocates; counters are zero, and what nobody has written is NaN in every dtype."""
    found = [torch.full((SIZE,), 0xFF, dtype=torch.uint8) for _ in range(world_size)]
    for memory in found:
        memory[:SHARES] = 0
    return found


def peers_of(memory: list[torch.Tensor], rank: int, rounds: int = 0) -> Peers:
    addresses = torch.tensor([each.data_ptr() for each in memory])
    return Peers(rank, addresses, torch.full((PROGRAMS,), rounds, dtype=torch.int32))


def inputs(rank: int, rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A rank's part, in rows with gaps between them."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, size + 8, generator=generator).to(dtype)[:, :size]


def shared_inputs(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, size), (size,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world_size", "rows", "size"), SHAPES)
def test_the_triton_kernel_is_the_reference_on_every_rank(world_size, rows, size, dtype):
    from atom_core.kernels.all_reduce_norm.triton_kernel import all_reduce_norm

    memory = memory_of(world_size)
    parts = [inputs(rank, rows, size, dtype) for rank in range(world_size)]
    residual, weight = shared_inputs(rows, size, dtype)
    for rank in range(world_size):  # ranks write one after the other, so the first have nothing to read yet
        all_reduce_norm(parts[rank], residual.clone(), weight, EPS, peers_of(memory, rank), nvidia=True, meet=False)
    expected = reference(parts, residual, weight, EPS)
    found = []
    for rank in range(world_size):
        peers, summed = peers_of(memory, rank), residual.clone()
        found.append((all_reduce_norm(parts[rank], summed, weight, EPS, peers, nvidia=True, meet=False), summed))
        assert peers.rounds.tolist() == [1] * min(rows, PROGRAMS) + [0] * max(0, PROGRAMS - rows)
    for mine, wanted in zip(found[0], expected, strict=True):
        # Two roundings; the interpreter's to bfloat16 are not to the nearest even.
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, wanted, rtol=step, atol=step)
    for others in found[1:]:
        for mine, theirs in zip(found[0], others, strict=True):
            assert torch.equal(mine, theirs)


#: What the ranks below are given in turn: launches of few and many programs, one behind the other.
LAUNCHES = [(1, 64), (5, 64), (1, 64), (1, 40), (9, 40), (2, 64), (9, 64), (1, 64), (9, 24)]


def _serve(rank, memory, rounds, results):
    """One rank: the launches, each after another while. The first reads so slowly that others are a launch ahead."""
    from triton.runtime.interpreter import InterpreterBuilder

    from atom_core.kernels.all_reduce_norm.triton_kernel import all_reduce_norm

    if rank == 0:
        load = InterpreterBuilder.create_masked_load
        InterpreterBuilder.create_masked_load = lambda *args: time.sleep(0.01) or load(*args)
    clock, peers, found = random.Random(rank), peers_of(memory, rank, rounds), []
    for seed, (rows, size) in enumerate(LAUNCHES):
        residual, weight = shared_inputs(rows, size, torch.float16, seed)
        time.sleep(clock.choice([0, 0, 0.02]))
        normed = all_reduce_norm(
            inputs(rank, rows, size, torch.float16, seed), residual, weight, EPS, peers, nvidia=True
        )
        found.append((normed, residual))
    results.put((rank, [tuple(it.tolist() for it in pair) for pair in found]))


@pytest.mark.parametrize("rounds", [0, 2**31 - 4], ids=["from the start", "where counts wrap around"])
def test_ranks_wait_for_each_other(rounds):
    """Processes of their own, which share memory and go at their own pace."""
    world_size = 3
    context = multiprocessing.get_context("spawn")
    memory = memory_of(world_size)
    for each in memory:
        counters = each[:SHARES].view(torch.int32)
        counters[:] = torch.tensor(rounds * world_size).to(torch.int32)
        each.share_memory_()
    results = context.Queue()
    ranks = [
        context.Process(target=_serve, args=(rank, memory, rounds, results), daemon=True) for rank in range(world_size)
    ]
    for each in ranks:
        each.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for each in ranks:
        each.join(30)
    for seed, (rows, size) in enumerate(LAUNCHES):
        parts = [inputs(rank, rows, size, torch.float16, seed) for rank in range(world_size)]
        residual, weight = shared_inputs(rows, size, torch.float16, seed)
        expected = reference(parts, residual, weight, EPS)
        mine = [torch.tensor(it, dtype=torch.float16) for it in found[0][seed]]
        for one, wanted in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=2**-9, atol=2**-9)
        assert all(found[rank][seed] == found[0][seed] for rank in range(world_size)), f"launch {seed}"


def test_the_definition_is_the_ops_that_it_is_made_of():
    parts, (residual, weight) = (
        [inputs(rank, 3, 16, torch.float32) for rank in range(4)],
        shared_inputs(3, 16, torch.float32),
    )
    separate = rms_norm(torch.stack(parts).sum(0), weight, EPS, residual)
    for found, expected in zip(reference(parts, residual, weight, EPS), separate, strict=True):
        torch.testing.assert_close(found, expected)


def group(world_size: int = 2, reason: str | None = None) -> SimpleNamespace:
    """What a spec asks of a group."""
    it = SimpleNamespace(world_size=world_size, peer_memory=None, why_no_peer_memory=lambda: reason)
    return type("Group", (SimpleNamespace,), {"__hash__": object.__hash__})(**vars(it))


FORCED = {"all_reduce_norm": "triton"}


def test_it_is_chosen_where_it_is_asked_for():
    spec = AllReduceNormSpec(4096, torch.bfloat16, group())
    kernels = kernel_set(H200)
    assert kernels.select(ALL_REDUCE_NORM, spec) is None
    (choice,) = kernels.choices()
    assert choice.implementation == "separate"
    assert "No engine has run with it" in choice.passed_over[0][1]
    assert kernel_set(H200, FORCED).select(ALL_REDUCE_NORM, spec) is not None
    assert kernel_set(Target("cpu", "")).select(ALL_REDUCE_NORM, spec) is None


def test_what_an_adapter_has_of_aiters_is_left_out_with_it():
    theirs = Implementation("aiter", always, lambda spec, target: "theirs")
    spec, mi300 = AllReduceNormSpec(4096, torch.bfloat16, group()), Target("rocm", "gfx942")
    kernels = kernel_set(mi300, contributed={"all_reduce_norm": theirs}, with_aiter=False)
    assert kernels.select(ALL_REDUCE_NORM, spec) is None
    assert ("aiter", "ATOM_AITER=0.") in kernels.choices()[0].passed_over
    forced = kernel_set(mi300, {"all_reduce_norm": "aiter"}, {"all_reduce_norm": theirs}, with_aiter=False)
    assert forced.select(ALL_REDUCE_NORM, spec) == "theirs"


@pytest.mark.parametrize(
    ("spec", "target", "reason"),
    [
        (AllReduceNormSpec(4096, torch.bfloat16, SingleRank(world_size=4)), H200, "share no memory"),
        (AllReduceNormSpec(4096, torch.bfloat16, group(reason="Ranks are on several hosts.")), H200, "several hosts"),
        (AllReduceNormSpec(4096, torch.bfloat16, group(16)), H200, "2 to 8 ranks, not 16"),
        (AllReduceNormSpec(4096, torch.float32, group()), H200, "bfloat16 and float16"),
        (AllReduceNormSpec(20480, torch.bfloat16, group()), H200, "up to 16384 elements"),
        (AllReduceNormSpec(4096, torch.bfloat16, group()), Target("cpu", ""), "need a GPU"),
        (AllReduceNormSpec(4096, torch.bfloat16, group()), Target("rocm", "gfx90a"), "not for gfx90a"),
    ],
    ids=["one rank", "several hosts", "16 ranks", "float32", "long rows", "a CPU", "another GPU of AMD's"],
)
def test_what_it_cannot_run_is_refused_in_words(spec, target, reason):
    with pytest.raises(ValueError, match=reason):
        kernel_set(target, FORCED).select(ALL_REDUCE_NORM, spec)


@pytest.mark.parametrize(("world_size", "rows"), [(2, 64), (4, 64), (8, 32)])
def test_it_takes_few_tokens(world_size, rows):
    kernel = kernel_set(H200, FORCED).select(
        ALL_REDUCE_NORM, AllReduceNormSpec(4096, torch.bfloat16, group(world_size))
    )
    taken = [count for count in range(100) if kernel.takes(torch.empty(count, 4096, dtype=torch.bfloat16))]
    assert taken == list(range(1, rows + 1))
