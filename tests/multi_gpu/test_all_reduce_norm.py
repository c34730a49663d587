"""The sum over GPUs with the norm behind it, over memory that they share: eager, and in graphs that are replayed."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import multiprocessing

from benchmarks.all_reduce_norm import free_port, join

EPS = 1e-6
REPLAYS = 200
#: Tokens and hidden size in turn: launches of few and many programs, of several rows a program, and of odd sizes.
LAUNCHES = ((1, 4096), (32, 4096), (3, 7168), (1, 4096), (37, 2881), (100, 1024), (2, 16384), (1, 2881))


def _random(tokens: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers on every rank that asks for them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, size, generator=generator).to("cuda", dtype)


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    step = 2 * torch.finfo(found.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=step, atol=step)


def _serve(rank: int, ranks: int, port: int) -> dict[str, Any]:
    from vllm.distributed import get_tp_group

    from atom_core.kernels import kernel_set
    from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec
    from atom_core.kernels.all_reduce_norm.reference import all_reduce_norm
    from atom_core.kernels.select import Target
    from atom_plugin.vllm.runtime import VllmCommunicator
    from benchmarks.all_reduce_norm import captured

    device = join(rank, ranks, port)
    group = VllmCommunicator(get_tp_group())
    kernels = kernel_set(Target.of(device), {"all_reduce_norm": "triton"}, with_aiter=False)
    found: dict[str, Any] = {"eager": [], "graphs": [], "alike": []}
    for dtype in (torch.bfloat16, torch.float16):
        cases = []
        for seed, (tokens, size) in enumerate(LAUNCHES):
            kernel = kernels.select(ALL_REDUCE_NORM, AllReduceNormSpec(size, dtype, group))
            assert kernel is not None
            parts = [_random(tokens, size, 100 * seed + peer, dtype) for peer in range(ranks)]
            residual, weight = _random(tokens, size, 100 * seed + 50, dtype), _random(1, size, 7, dtype)[0]
            assert kernel.takes(parts[rank]), (tokens, size)
            expected = all_reduce_norm(parts, residual, weight, EPS)
            results = kernel(parts[rank], residual.clone(), weight, EPS)
            found["eager"].append(all(_near(*pair) for pair in zip(results, expected, strict=True)))
            cases.append((kernel, parts[rank].clone(), residual.clone(), weight, residual, parts))

        def step(cases: list[Any] = cases) -> list[torch.Tensor]:
            return [kernel(x, residual, weight, EPS)[0] for kernel, x, residual, weight, *_ in cases]

        outputs: list[torch.Tensor] = []

        def run(outputs: list[torch.Tensor] = outputs) -> None:
            outputs[:] = step()

        graph = captured(run)
        for replay in range(REPLAYS):
            # Parts change places, so a number of the launch before shows; one rank comes late now and then.
            for _, x, residual, _, before, parts in cases:
                x.copy_(parts[(rank + replay) % ranks])
                residual.copy_(before)
            if replay % ranks == rank:
                torch.cuda._sleep(200_000)
            graph.replay()
            if replay % 20 == 0:
                for (_, _, residual, weight, before, parts), normed in zip(cases, outputs, strict=True):
                    turned = [parts[(peer + replay) % ranks] for peer in range(ranks)]
                    expected = all_reduce_norm(turned, before, weight, EPS)
                    pairs = ((normed, expected[0]), (residual, expected[1]))
                    found["graphs"].append(all(_near(*pair) for pair in pairs))
                    for mine, _ in pairs:
                        everyone = group.all_gather(mine.contiguous().view(torch.int16).float(), 0).view(ranks, -1)
                        found["alike"].append(bool((everyone == everyone[0]).all()))
    torch.cuda.synchronize()
    torch.distributed.barrier()
    return found


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"it takes {request.param} GPUs")
    port = free_port()
    with ProcessPoolExecutor(request.param, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_serve, rank, request.param, port) for rank in range(request.param)]
        return [each.result(timeout=300) for each in running]


def test_it_is_the_reference(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["eager"]
        assert all(found["eager"])


def test_replays_are_the_reference_however_late_a_rank_comes(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["graphs"]
        assert all(found["graphs"])


def test_all_ranks_have_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["alike"]
        assert all(found["alike"])
