"""Experts in MXFP4: the numbers against Hugging Face's, the reference and the Triton kernels against the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.mxfp4_experts import Mxfp4Weights
from atom_core.kernels.mxfp4_experts.reference import ReferenceMxfp4Experts, dequantize
from tests.unit.core.kernels.test_experts import TOLERANCE, assert_close, by_definition, operands

SPEC = ExpertsSpec(0, 6, 64, 32, 3, "clamped_swiglu", bias=True, dtype=torch.float32)
SPECS = {
    "all experts": SPEC,
    "without biases": replace(SPEC, bias=False),
    "SiLU": replace(SPEC, activation="silu"),
    "one expert a token": replace(SPEC, top_k=1),
    "the first of them": replace(SPEC, count=3),
    "the last of them": replace(SPEC, first=4, count=2),
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
    gate_up, down = packed(layer.gate_up.shape, 1), packed(layer.down.shape, 2)
    return x, weights, experts, Mxfp4Weights(*gate_up, *down, layer.gate_up_bias, layer.down_bias)


def expected(spec, x, weights, experts, layer):
    gate_up = dequantize(layer.gate_up, layer.gate_up_scale, torch.float64)
    down = dequantize(layer.down, layer.down_scale, torch.float64)
    whole = ExpertWeights(gate_up, down, layer.gate_up_bias, layer.down_bias)
    return by_definition(spec, x, weights, experts, whole)


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
    assert_close(TritonMxfp4Experts(spec, overlap=False)(*given), expected(spec, *given))
