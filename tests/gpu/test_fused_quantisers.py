"""Norms and activations that quantise on this GPU: the numbers of separate kernels, also in a captured graph."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.fp8_gated_activation.triton_kernel import TritonFp8GatedActivation
from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.fp8_linear.quantize import AS_IT_IS
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_rms_norm.triton_kernel import TritonFp8RmsNorm, quantized
from atom_core.kernels.gated_activation.triton_kernel import gated_activation
from atom_core.kernels.rms_norm.triton_kernel import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps

GPU = torch.device("cuda")
OVERLAP = overlaps(Target.of(GPU))
EPS = 1e-6
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
every_form = pytest.mark.parametrize("form", [InputForm(E4M3, 128), InputForm(E4M3, None)], ids=["groups", "rows"])
every_number = pytest.mark.parametrize("rows", [68, 256, 1028])


def numbers(rows, size, dtype, seed=0):
    """Rows have a gap of NaN after them."""
    torch.manual_seed(seed)
    wide = torch.full((rows, size + 8), float("nan"), dtype=dtype, device=GPU)
    wide[:, :size] = torch.randn(rows, size, device=GPU)
    return wide[:, :size]


def widened(found, form):
    values, scales = found
    if form.group is None:
        return values.float() * scales
    return values.float() * scales.t().repeat_interleave(form.group, 1)[:, : values.shape[1]]


def assert_same(found, separate, form):
    """But for numbers that a last bit before took to the next one of FP8."""
    mine, theirs = widened(found, form), widened(quantized(separate, form, OVERLAP, AS_IT_IS), form)
    assert mine.isfinite().all()
    torch.testing.assert_close(mine, theirs, rtol=2**-3, atol=1e-3)
    assert (mine != theirs).float().mean() <= 1e-3


@every_dtype
@every_form
@every_number
@pytest.mark.parametrize("size", [2048, 4096, 7168, 12288])
@pytest.mark.parametrize("added", [False, True])
def test_a_norm(added, size, rows, form, dtype):
    x, stream = numbers(rows, size, dtype), numbers(rows, size, dtype, seed=1)
    weight = (1 + 0.1 * torch.randn(size, device=GPU)).to(dtype)
    normed, summed = rms_norm(x.clone(), weight, EPS, stream.clone() if added else None, overlap=OVERLAP)
    mine = stream if added else None
    found, total = TritonFp8RmsNorm(form, OVERLAP)(x, weight, EPS, mine)
    assert_same(found, normed, form)
    assert total is mine
    if added:
        assert torch.equal(total, summed)


@every_dtype
@every_form
@every_number
@pytest.mark.parametrize("size", [768, 12288, 16384])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_an_activation(activation, size, rows, form, dtype):
    x = numbers(rows, 2 * size, dtype)
    found = TritonFp8GatedActivation(activation, form, OVERLAP)(x)
    assert_same(found, gated_activation(x, activation, OVERLAP), form)


@every_form
def test_a_graph_replays_for_other_numbers(form):
    rows, size = 256, 4096
    x, weight = numbers(rows, 2 * size, torch.bfloat16), torch.ones(size, dtype=torch.bfloat16, device=GPU)
    activate, norm = TritonFp8GatedActivation("silu", form, OVERLAP), TritonFp8RmsNorm(form, OVERLAP)

    def run():
        return activate(x), norm(x[:, :size], weight, EPS, None)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    x.copy_(numbers(rows, 2 * size, torch.bfloat16, seed=2))
    graph.replay()
    for mine, theirs in zip(found, run(), strict=True):
        assert torch.equal(widened(mine, form), widened(theirs, form))
