"""Norms, gated activations and products of few rows on this GPU, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from atom_core.kernels.embedding.reference import embedding as embedding_reference
from atom_core.kernels.embedding.triton_kernel import embedding
from atom_core.kernels.gated_activation.reference import gated_activation as gated_activation_reference
from atom_core.kernels.gated_activation.triton_kernel import gated_activation as launch_gated_activation
from atom_core.kernels.gated_sum.triton_kernel import gated_sum
from atom_core.kernels.linear.tiles import MAX_ROWS, MOST_ROWS, chosen_tile
from atom_core.kernels.linear.triton_kernel import TritonLinear
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear
from atom_core.kernels.output_gate.triton_kernel import multiply_by_gate
from atom_core.kernels.rms_norm.reference import rms_norm as rms_norm_reference
from atom_core.kernels.rms_norm.triton_kernel import rms_norm as launch_rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps

GPU = torch.device("cuda")
OVERLAP = overlaps(Target.of(GPU))
rms_norm = partial(launch_rms_norm, overlap=OVERLAP)
gated_activation = partial(launch_gated_activation, overlap=OVERLAP)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
#: One rounding of the result, and of sums in float32.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-5}


def numbers(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device=GPU) * scale).to(dtype)


def assert_close(found, expected, ulps=1):
    tolerance = ulps * TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@every_dtype
@pytest.mark.parametrize("size", [64, 1000, 1024, 4096, 12288])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_rms_norm(rows, size, dtype):
    x, residual, weight = numbers(rows, size, dtype=dtype), numbers(rows, size, dtype=dtype), numbers(size, dtype=dtype)
    for given in (None, residual):
        total = x if given is None else (x.float() + given.float()).to(dtype)
        wide = total.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        normed, summed = rms_norm(x.clone(), weight, 1e-6, None if given is None else given.clone())
        assert_close(normed, expected)
        assert summed is None if given is None else torch.equal(summed, total)


def test_rms_norm_of_rows_of_a_wider_tensor():
    wide, weight = numbers(5, 300, dtype=torch.bfloat16), numbers(100, dtype=torch.bfloat16)
    part = wide[:, 100:200]
    normed, _ = rms_norm(part, weight, 1e-6, None)
    assert torch.equal(normed, rms_norm(part.contiguous(), weight, 1e-6, None)[0])


@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("size", [96, 1024, 12288])
@pytest.mark.parametrize("rows", [1, 5, 2000])
def test_gated_activation(rows, size, activation, dtype):
    x = numbers(rows, 2 * size, dtype=dtype, scale=3.0)
    assert_close(gated_activation(x, activation), gated_activation_reference(x.double(), activation))


@every_dtype
@pytest.mark.parametrize(("heads", "dim"), [(3, 40), (16, 256)])
@pytest.mark.parametrize("rows", [1, 5, 2000])
def test_output_gate(rows, heads, dim, dtype):
    gate = numbers(rows, 3 * heads * dim, dtype=dtype, scale=4.0)[:, 2 * heads * dim :]
    out = numbers(rows, heads, dim, dtype=dtype)
    expected = out.double() * gate.double().sigmoid().view(out.shape)
    multiply_by_gate(out, gate, OVERLAP)
    assert_close(out, expected)


@every_dtype
@pytest.mark.parametrize("size", [96, 2048, 4100])
@pytest.mark.parametrize("rows", [1, 5, 2000])
@pytest.mark.parametrize("wide", [False, True], ids=["logits in the model's dtype", "logits in float32"])
def test_gated_sum(rows, size, wide, dtype):
    x, y = numbers(rows, size, dtype=dtype), numbers(rows, size, dtype=dtype, scale=3.0)
    gate = numbers(rows, 16, dtype=torch.float32 if wide else dtype)[:, 3, None]
    assert_close(gated_sum(x, y, gate, OVERLAP), x.double() + gate.double().sigmoid() * y.double())


@every_dtype
@pytest.mark.parametrize("first", [None, 50])
@pytest.mark.parametrize("size", [100, 4096, 5000])
def test_embedding(size, first, dtype):
    table = numbers(200, size, dtype=dtype)
    ids = torch.arange(0, 200 if first is None else 400, 7, device="cuda")
    assert torch.equal(embedding(ids, table, first), embedding_reference(ids, table, first))


SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (1024, 3072)]
ODD_SHAPES = [(100, 80), (513, 1000), (31, 4104)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES + ODD_SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 16, 17, 33, MAX_ROWS, MAX_ROWS + 1, 130, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows, out_features, in_features, bias, dtype):
    x = numbers(rows, in_features + 8, dtype=dtype)[:, :in_features]
    weight = numbers(out_features, in_features, dtype=dtype, scale=in_features**-0.5)
    offset = numbers(out_features, dtype=dtype) if bias else None
    found = TritonLinear(torch.version.hip is None, OVERLAP)(x, weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    assert found.shape == (rows, out_features)
    if rows and chosen_tile(x, weight, torch.version.hip is None) is None:
        assert torch.equal(found, F.linear(x, weight, offset))
    else:
        assert_close(found, expected)


@pytest.mark.parametrize(("out_features", "in_features"), [(64, 2048), (256, 7168), (100, 80)])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, MAX_ROWS, MAX_ROWS + 1])
def test_results_in_float32(rows, out_features, in_features):
    x, norm = numbers(rows, in_features, dtype=torch.bfloat16), numbers(in_features, dtype=torch.bfloat16)
    weight = numbers(out_features, in_features, dtype=torch.bfloat16, scale=in_features**-0.5)
    found = TritonLinear(torch.version.hip is None, OVERLAP, float32_result=True)(x, weight, None)
    expected = x.double() @ weight.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    if rows == 1:
        normed = TritonNormedLinear(None, torch.version.hip is None, OVERLAP)
        found = normed(x, norm, 1e-6, Operands(weight, None, float32_result=True))
        expected = rms_norm_reference(x.double(), norm.double(), 1e-6, None)[0] @ weight.double().T
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("out_features", "in_features"), [*SHAPES, (100, 80), (514, 1000)])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, MAX_ROWS, 100, MOST_ROWS])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_normed_linear_and_a_residual_behind_it(activation, rows, out_features, in_features):
    x, norm = numbers(rows, in_features, dtype=torch.bfloat16), numbers(in_features, dtype=torch.bfloat16)
    weight = numbers(out_features, in_features, dtype=torch.bfloat16, scale=in_features**-0.5)
    back = numbers(in_features, out_features if activation is None else out_features // 2, dtype=torch.bfloat16)
    back *= back.shape[1] ** -0.5
    nvidia = torch.version.hip is None
    normed, linear = TritonNormedLinear(activation, nvidia, OVERLAP), TritonLinear(nvidia, OVERLAP)
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    if rows > 1:
        # A kernel of its own norms it, and rounds; the next number of bfloat16 is as right, and other products.
        wide = rms_norm(x.clone(), norm, 1e-6, None)[0].double()
    expected = wide @ weight.double().T
    if activation is not None:
        expected = gated_activation_reference(expected.to(x.dtype).double(), activation)
    y = normed(x, norm, 1e-6, Operands(weight, None))
    # Gate and up are rounded, each to a neighbour perhaps, before they are multiplied.
    assert_close(y, expected, ulps=1 if activation is None else 2)
    residual = x.clone()
    assert linear.add(y, back, None, residual) is residual
    assert_close(residual, x.double() + y.double() @ back.double().T)

    def body(x, residual):
        y = normed(x, norm, 1e-6, Operands(weight, None))
        return y, linear.add(y, back, None, residual)

    for found, wanted in zip(_captured(body, x, x), (y, residual), strict=True):
        assert torch.equal(found, wanted)


def test_they_are_one_op_each_to_a_compiler_and_run_in_graphs():
    weight, norm = numbers(96, 64, dtype=torch.bfloat16), numbers(64, dtype=torch.bfloat16)
    linear = TritonLinear(torch.version.hip is None, OVERLAP)

    def body(x, residual):
        y, residual = rms_norm(x, norm, 1e-6, residual)
        return gated_activation(linear(y, weight, None), "silu"), residual

    compiled = torch.compile(body, fullgraph=True, dynamic=True)
    for rows in (3, 40):
        x, residual = numbers(rows, 64, dtype=torch.bfloat16), numbers(rows, 64, dtype=torch.bfloat16)
        expected = body(x.clone(), residual.clone())
        for found in (compiled(x.clone(), residual.clone()), _captured(body, x, residual)):
            assert all(torch.equal(mine, his) for mine, his in zip(found, expected, strict=True))


def _captured(body, x, residual):
    given = x.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = body(*given)
    given[0].copy_(x)
    given[1].copy_(residual)
    graph.replay()
    return found
