"""Experts in MXFP4: the numbers against Hugging Face's, the reference and the Triton kernels against the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from atom_core.kernels.experts import ExpertWeights
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.mxfp4_experts import Mxfp4ExpertsSpec, Mxfp4Weights, empty_scales
from atom_core.kernels.mxfp4_experts.reference import ReferenceMxfp4Experts
from atom_core.kernels.mxfp4_linear.reference import dequantize, round_groups
from atom_core.kernels.rms_norm.reference import rms_norm
from tests.unit.core.kernels.test_experts import TOLERANCE, assert_close, by_definition, operands

#: Of the tokens whose inputs are rounded in 16 bits.
NEAR = 0.9
SPEC = Mxfp4ExpertsSpec(0, 6, 64, 32, 3, "clamped_swiglu", bias=True, dtype=torch.float32)
SPECS = {
    "all experts": SPEC,
    "without biases": replace(SPEC, bias=False),
    "SiLU": replace(SPEC, activation="silu"),
    "one expert a token": replace(SPEC, top_k=1),
    "the first of them": replace(SPEC, count=3),
    "the last of them": replace(SPEC, first=4, count=2),
    "inputs are rounded": replace(SPEC, rounded_inputs=True, hidden_size=96, intermediate_size=64),
    "inputs of the last of them are rounded": replace(SPEC, rounded_inputs=True, first=4, count=2, activation="silu"),
    "several tiles of gate and up": replace(SPEC, hidden_size=1120, top_k=1),
    "several tiles of down": replace(SPEC, intermediate_size=1056, top_k=1),
}


def packed(shape, seed):
    """Blocks and scales of a weight of ``shape``, as large as weights are."""
    generator = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    blocks = torch.randint(256, (*rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 125, (*rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def packed_operands(spec, tokens, dtype):
    x, weights, experts, layer = operands(spec, tokens, dtype)
    gate_up, down = (
        (blocks, empty_scales(*shape).copy_(scales))
        for shape, (blocks, scales) in ((it.shape, packed(it.shape, seed)) for seed, it in enumerate(layer[:2], 1))
    )
    return x, weights, experts, Mxfp4Weights(*gate_up, *down, layer.gate_up_bias, layer.down_bias)


def expected(spec, x, weights, experts, layer):
    """float64; where inputs are rounded, the intermediate result has the dtype of ``x`` first."""
    if spec.rounded_inputs:
        return by_definition_rounded(spec, x, weights, experts, layer)
    gate_up = dequantize(layer.gate_up, layer.gate_up_scale, torch.float64)
    down = dequantize(layer.down, layer.down_scale, torch.float64)
    whole = ExpertWeights(gate_up, down, layer.gate_up_bias, layer.down_bias)
    return by_definition(spec, x, weights, experts, whole)


def by_definition_rounded(spec, x, weights, experts, layer):
    y = torch.zeros(x.shape, dtype=torch.float64)
    rounded = round_groups(x).double()
    for token, place in ((token, place) for token in range(len(x)) for place in range(spec.top_k)):
        index = int(experts[token, place]) - spec.first
        if not 0 <= index < spec.count:
            continue
        gate_up = dequantize(layer.gate_up[index], layer.gate_up_scale[index], torch.float64)
        down = dequantize(layer.down[index], layer.down_scale[index], torch.float64)
        both = gate_up @ rounded[token]
        if layer.gate_up_bias is not None:
            both = both + layer.gate_up_bias[index].double()
        # A number at the middle of two becomes the other where it was rounded otherwise before.
        intermediate = round_groups(gated_activation(both.to(x.dtype), spec.activation)).double()
        output = down @ intermediate
        if layer.down_bias is not None:
            output = output + layer.down_bias[index].double()
        y[token] += weights[token, place].double() * output
    return y


every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def test_numbers_are_hugging_faces():
    blocks, scales = packed((2, 8, 128), 0)
    blocks[0, 0] = torch.arange(64) * 4 + 3
    theirs = convert_moe_packed_tensors(blocks.unflatten(-1, (-1, 16)), scales, dtype=torch.float32)
    assert torch.equal(dequantize(blocks, scales, torch.float32), theirs.transpose(1, 2))


def test_all_numbers_and_scales_are_what_the_format_says():
    blocks = torch.arange(16, dtype=torch.uint8)[None] | 0x70  # each code in turn, and 6 behind it
    for scale in (0, 1, 127, 240):
        found = dequantize(blocks, torch.tensor([[scale]], dtype=torch.uint8), torch.float64)
        positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        assert found[0, ::2].tolist() == [sign * it * 2.0 ** (scale - 127) for sign in (1, -1) for it in positive]
        assert found[0, 1::2].tolist() == [6 * 2.0 ** (scale - 127)] * 16


@every_spec
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_reference_is_the_definition(spec, dtype, tokens):
    given = packed_operands(spec, tokens, dtype)
    assert_close(ReferenceMxfp4Experts(spec)(*given), expected(spec, *given))


@every_spec
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_triton(spec, dtype, tokens):
    from atom_core.kernels.mxfp4_experts.triton_kernel import TritonMxfp4Experts

    given = packed_operands(spec, tokens, dtype)
    found, wanted = TritonMxfp4Experts(spec, overlap=False)(*given), expected(spec, *given)
    if tokens and spec.rounded_inputs and dtype != torch.float32:
        # A number of the intermediate result at a tie, the next of float16's here, becomes another of four bits.
        near = (found.double() - wanted).abs().amax(-1) <= TOLERANCE[dtype] * wanted.abs().max()
        assert near.double().mean() >= NEAR
        found, wanted = found[near], wanted[near]
    assert_close(found, wanted)


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_answers_are_added_to_a_residual(tokens):
    from atom_core.kernels.mxfp4_experts.triton_kernel import TritonMxfp4Experts

    given = packed_operands(SPEC, tokens, torch.float32)
    residual = torch.randn(tokens, SPEC.hidden_size)
    wanted = residual.double() + expected(SPEC, *given)
    found = TritonMxfp4Experts(SPEC, overlap=False).add(*given, residual)
    assert found is residual
    assert_close(found, wanted)


@pytest.mark.parametrize("rounded", [False, True])
def test_one_token_is_normed_on_the_way(rounded):
    from atom_core.kernels.mxfp4_experts.triton_kernel import TritonMxfp4Experts

    spec = replace(SPEC, rounded_inputs=rounded)
    x, weights, experts, layer = packed_operands(spec, 1, torch.float32)
    stream, norm = x.contiguous(), torch.rand(spec.hidden_size)
    wanted = stream.double() + expected(spec, rms_norm(stream, norm, 1e-6, None)[0], weights, experts, layer)
    found = TritonMxfp4Experts(spec, overlap=False).add_after_norm(stream, norm, 1e-6, weights, experts, layer)
    assert found is stream
    assert_close(found, wanted)
