"""FP8 experts of few routed tokens for Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.experts.grouped import LocalExperts, sort_by_expert
from atom_core.kernels.fp8_linear.reference import E4M3, LIMIT
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from tests.gluon_on_cpu import on_cpu

DTYPE = torch.float16
TOKENS, TOP_K, COUNT, HIDDEN, SIZE = 5, 3, 7, 256, 256
WHOLE = LocalExperts(0, COUNT, TOP_K, whole=True)
every_block = pytest.mark.parametrize("block", [128, 0], ids=["blocks", "rows"])
every_sorting = pytest.mark.parametrize("is_sorted", [False, True], ids=["not sorted", "sorted"])


@pytest.fixture
def kernels(monkeypatch):
    """The module as a CPU runs it, whose programs have as many tiles as a test says."""
    with on_cpu() as modules:
        yield modules["atom_core.kernels.fp8_experts.hopper"]


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (30 * torch.randn(*shape, generator=generator)).clamp(-448, 448).to(E4M3)


def scales_of(*shape, seed=0):
    return torch.exp2(4 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))) * 1e-3


def weight_of(rows, columns, block):
    """A weight of all experts, and its scales, which differ by up to 16 times."""
    scales = scales_of(COUNT, -(-rows // block), columns // block) if block else scales_of(COUNT, rows)
    return numbers(COUNT, rows, columns), scales


def wide_weight(weight, scales, block):
    each = scales.repeat_interleave(block, 1).repeat_interleave(block, 2) if block else scales[..., None]
    return weight.double() * each.double()[:, : weight.shape[1]]


def inputs_of(rows, columns, block):
    """In FP8, and the scales of its groups or rows."""
    return numbers(rows, columns, seed=1), scales_of(columns // block if block else 1, rows, seed=1)


def wide_input(x, scales, block):
    return x.double() * scales.double().T.repeat_interleave(block or x.shape[1], 1)


def routing():
    """The experts of each token, some of several tokens, and their weights."""
    generator = torch.Generator().manual_seed(2)
    experts = torch.rand(TOKENS, COUNT, generator=generator).argsort(-1)[:, :TOP_K].int().contiguous()
    return experts, torch.rand(TOKENS, TOP_K, generator=generator)


def rows_of(experts, local_experts, blocks):
    """The row of each routed token that is local, among those of an intermediate result, and its token and expert."""
    for place, expert in enumerate(experts.flatten().tolist()):
        local = expert - local_experts.first
        if 0 <= local < local_experts.count:
            row = place if blocks is None else blocks.slots.tolist().index(place)
            yield row, place, place // TOP_K, local


@every_block
@every_sorting
@pytest.mark.parametrize(("tiles", "stages"), [(1, 5), (2, 4), (4, 5)])
@pytest.mark.parametrize("local_experts", [WHOLE, replace(WHOLE, first=2, whole=False)], ids=["all", "some"])
def test_gate_and_up(monkeypatch, kernels, local_experts, tiles, stages, is_sorted, block):
    monkeypatch.setattr(kernels, "pipeline_of_program", lambda *given, **options: (tiles, stages))
    experts, _ = routing()
    blocks = sort_by_expert(experts, local_experts, 16) if is_sorted else None
    weight, scales = weight_of(2 * SIZE, HIDDEN, block)
    x, of_x = inputs_of(TOKENS, HIDDEN, block)
    out = torch.full((TOKENS * TOP_K if blocks is None else len(blocks.slots), SIZE), torch.nan, dtype=DTYPE)
    fp8_out = kernels.empty_fp8_out(out, TOKENS * TOP_K if blocks is None else len(blocks.experts), E4M3)
    fp8_out.arrivals.zero_()
    kernels.multiply_few_routed_tokens(
        x, of_x, experts, blocks, None, weight, scales, out, local_experts,
        block=block, activation=ACTIVATIONS["silu"], overlap=False, fp8_out=fp8_out if block else None,
    )  # fmt: skip
    wide, given = wide_weight(weight, scales, block), wide_input(x, of_x, block)
    (stored, of_stored), found = fp8_out.quantized, list(rows_of(experts, local_experts, blocks))
    assert found
    for row, _, token, expert in found:
        wanted = gated_activation((given[token] @ wide[expert].T)[None], "silu")[0]
        torch.testing.assert_close(out[row].double(), wanted, rtol=2**-8, atol=2**-8 * wanted.abs().max().item())
        if block:
            groups = out[row].float().reshape(-1, 128)
            each = groups.abs().amax(-1) / LIMIT
            torch.testing.assert_close(of_stored[:, row], each)
            close = (stored[row].float().reshape(-1, 128) * each[:, None] - groups).abs()
            assert (close <= 2**-4 * groups.abs() + each[:, None]).all()
    others = torch.ones(len(out), dtype=torch.bool)
    others[[row for row, *_ in found]] = False
    assert out[others].isnan().all()


@every_block
@every_sorting
@pytest.mark.parametrize(("tiles", "stages"), [(1, 5), (2, 4), (4, 5)])
def test_down(monkeypatch, kernels, tiles, stages, is_sorted, block):
    monkeypatch.setattr(kernels, "pipeline_of_program", lambda *given, **options: (tiles, stages))
    experts, shares = routing()
    blocks = sort_by_expert(experts, WHOLE, 16) if is_sorted else None
    weight, scales = weight_of(HIDDEN, SIZE, block)
    x, of_x = inputs_of(TOKENS * TOP_K if blocks is None else len(blocks.slots), SIZE, block)
    out = torch.full((TOKENS * TOP_K, HIDDEN), torch.nan)
    kernels.multiply_few_routed_tokens(
        x, of_x, experts, blocks, shares, weight, scales, out, WHOLE, block=block, activation=None, overlap=False
    )
    wide, given = wide_weight(weight, scales, block), wide_input(x, of_x, block)
    for row, place, _, expert in rows_of(experts, WHOLE, blocks):
        wanted = given[row] @ wide[expert].T * shares.flatten()[place].double()
        torch.testing.assert_close(out[place].double(), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "gate_up", "down"),
    [
        (2, 257, 9, (1, 5), (1, 4)),
        (4, 257, 9, (1, 4), (4, 5)),
        (8, 257, 9, (2, 5), (4, 5)),
        (16, 257, 9, (1, 4), (8, 5)),
        (8, 129, 9, (2, 5), (4, 5)),
    ],
)
def test_pipeline_of_a_program(kernels, tokens, count, top_k, gate_up, down):
    experts = LocalExperts(0, count, top_k, whole=True)
    hidden, size = 2048, 512
    assert kernels.pipeline_of_program(tokens, experts, 2 * size, hidden, gated=True) == gate_up
    assert kernels.pipeline_of_program(tokens, experts, hidden, size, gated=False) == down
    # Where some experts are other ranks', nobody knows how many run here.
    some = replace(experts, whole=False)
    assert kernels.pipeline_of_program(tokens, some, hidden, size, gated=False) == (1, 4)


def test_pipeline_of_programs_of_30b_a3b(kernels):
    experts = LocalExperts(0, 128, 8, whole=True)
    assert kernels.pipeline_of_program(8, experts, 1536, 2048, gated=True) == (2, 4)  # 620 programs
    assert kernels.pipeline_of_program(8, experts, 2048, 768, gated=False) == (4, 5)  # 413


def test_tiles_of_a_program_divide_the_weight_and_are_short(kernels):
    experts = LocalExperts(0, 256, 8, whole=True)
    assert kernels.pipeline_of_program(16, experts, 4096, 7168, gated=True).tiles == 1
    assert kernels.pipeline_of_program(16, experts, 7168, 2048, gated=False).tiles == 1
    assert kernels.pipeline_of_program(16, experts, 64 * 9, 512, gated=False).tiles == 1
    # A group of 128 results is four tiles, and where those are too few there are no fewer programs at once.
    assert kernels.pipeline_of_program(16, experts, 1024, 128, gated=True).tiles == 4
    assert kernels.pipeline_of_program(16, experts, 2048, 128, gated=True).tiles == 1
