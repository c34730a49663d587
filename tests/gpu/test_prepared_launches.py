"""Entry kernels on this GPU: a variant is launched without Triton from the second time on, and computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from atom_core.kernels.gated_sum.reference import gated_sum as gated_sum_reference
from atom_core.kernels.gated_sum.triton_kernel import gated_sum
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.rms_norm.reference import rms_norm as rms_norm_reference
from atom_core.kernels.rms_norm.triton_kernel import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps

GPU = torch.device("cuda")
OVERLAP = overlaps(Target.of(GPU))


@entry_kernel
@triton.jit
def _add(x, y, out, number, factor, N, BLOCK: tl.constexpr):
    """``out = x factor + number``, and ``y`` where there is one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < N, other=0) * factor + number
    if y is not None:
        total += tl.load(y + at, mask=at < N, other=0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < N)


@entry_kernel
@triton.jit
def _copy(rows, out, stride_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile of a tensor descriptor that is the program's."""
    row = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS
    tile = rows.load([row, column])
    to = (row + tl.arange(0, ROWS))[:, None] * stride_out + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + to, tile)


class Launches:
    """Of Triton's own."""

    number = 0


@pytest.fixture
def by_triton() -> Iterator[Launches]:
    counted, run = Launches(), JITFunction.run

    def count(self, *args, **given):
        counted.number += 1
        return run(self, *args, **given)

    with mock.patch.object(JITFunction, "run", count):
        yield counted


def assert_sum(x, y, number, factor=2, block=64):
    size = len(x) if y is None else min(len(x), len(y))
    out = torch.full((size,), -1, dtype=torch.int64, device=x.device)
    _add[(triton.cdiv(size, block),)](x, y, out, number, factor, size, BLOCK=block, num_warps=1)
    expected = x[:size].to(torch.int64) * factor + number + (0 if y is None else y[:size].to(torch.int64))
    assert torch.equal(out, expected)


def test_what_arguments_a_launch_has_makes_no_wrong_kernel(by_triton):
    """Each difference is a variant, one after the other, there and back."""
    x = torch.arange(1024, dtype=torch.int64, device=GPU)
    cases = [
        (x, None, 16),
        (x, None, 17),
        (x, None, 1),
        (x, None, -16),
        (x, None, 2**31 - 16),
        (x, None, 2**31),
        (x, None, 2**40 + 1),
        (x, x, 16),
        (x[1:], x[1:], 16),
        (x[1:1008], None, 16),
        (x[:1], x[7:8], 0),
        (x.int(), None, 16),
        (x.int()[1:], x.int()[2:], 16),
        (x.short(), x, 1),
        (x[: 16 * 5], None, 16, 1),
        (x[: 16 * 5], None, 16, 3, 128),
    ]
    for case in cases:
        assert_sum(*case)
    assert by_triton.number
    before = by_triton.number
    for case in (*cases, *reversed(cases)):
        assert_sum(*case)
    assert by_triton.number == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_of_rows_that_begin_anywhere(dtype, by_triton):
    wide, weight = torch.randn(64, 1040, device=GPU).to(dtype), torch.randn(1024, device=GPU).to(dtype)

    def run() -> None:
        for first, size in ((0, 1024), (1, 1024), (8, 1024), (16, 1000), (3, 1)):
            x = wide[:, first : first + size]
            for rows in (1, 16, 17):
                found, _ = rms_norm(x[:rows], weight[:size], 1e-6, None, overlap=OVERLAP)
                expected, _ = rms_norm_reference(x[:rows], weight[:size], 1e-6, None)
                torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)

    run()
    before = by_triton.number
    run()
    assert by_triton.number == before


def test_a_graph_replays_what_was_prepared(by_triton):
    x, y, gate = torch.randn(3, 32, 512, device=GPU, dtype=torch.bfloat16)
    found = gated_sum(x, y, gate[:, :1], overlap=OVERLAP)
    torch.cuda.synchronize()
    before = by_triton.number
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated_sum(x, y, gate[:, :1], overlap=OVERLAP)
    assert by_triton.number == before
    for _ in range(3):
        x.normal_()
        gate.normal_()
        graph.replay()
        torch.testing.assert_close(found, gated_sum_reference(x, y, gate[:, :1]), rtol=2**-6, atol=2**-6)


def test_a_launch_goes_to_the_stream_of_its_time(by_triton):
    x, out = torch.ones(64, dtype=torch.int64, device=GPU), torch.zeros(64, dtype=torch.int64, device=GPU)
    for _ in range(2):
        _add[(1,)](x, None, out, 16, 2, 64, BLOCK=64, num_warps=1)
    torch.cuda.synchronize()
    out.zero_()
    torch.cuda.synchronize()
    before, side = by_triton.number, torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)  # half a second
        _add[(1,)](x, None, out, 16, 2, 64, BLOCK=64, num_warps=1)
    early = out.clone()  # on the current stream, which does not wait for the other
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert by_triton.number == before
    assert not early.any()
    assert torch.equal(out, torch.full_like(out, 18))


def test_each_gpu_of_a_process_has_its_own(by_triton):
    for _ in range(2):
        before = by_triton.number
        for index in range(torch.cuda.device_count()):
            with torch.cuda.device(index):
                assert_sum(torch.arange(96, dtype=torch.int16, device=f"cuda:{index}"), None, 5, 7, 32)
    assert by_triton.number == before


def test_tensor_descriptors_are_those_of_the_launch(by_triton):
    """Another tensor of another size is no new variant; other tiles or another dtype are."""

    def assert_copied(given: torch.Tensor, tile: tuple[int, int]) -> None:
        out = torch.zeros_like(given)
        grid = given.shape[0] // tile[0], given.shape[1] // tile[1]
        described = TensorDescriptor.from_tensor(given, list(tile))
        _copy[grid](described, out, out.stride(0), ROWS=tile[0], COLUMNS=tile[1])
        assert torch.equal(out, given)

    first, second = torch.randn(64, 128, device=GPU), torch.randn(128, 256, device=GPU)
    assert_copied(first, (16, 32))
    before = by_triton.number
    assert_copied(second, (16, 32))
    assert_copied(first, (16, 32))
    assert by_triton.number == before
    for _ in range(2):
        assert_copied(first, (32, 32))
        assert_copied(second.bfloat16(), (16, 32))
    assert by_triton.number == before + 2


def test_hooks_at_a_launch_are_called(by_triton):
    x = torch.arange(64, dtype=torch.int64, device=GPU)
    assert_sum(x, None, 16)
    before, seen = by_triton.number, []

    def note(metadata) -> None:
        seen.append(metadata.get()["name"])

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(note)
    try:
        assert_sum(x, None, 16)
    finally:
        for hook in hooks:
            hook.remove(note)
    assert_sum(x, None, 16)
    assert seen == ["_add", "_add"]
    assert by_triton.number == before


def test_a_tensor_of_the_cpu_is_refused_as_by_triton(by_triton):
    x = torch.arange(64, dtype=torch.int64, device=GPU)
    assert_sum(x, None, 16)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        _add[(1,)](x.cpu(), None, x.clone(), 16, 2, 64, BLOCK=64, num_warps=1)
