"""More rows than a product quantises itself: norms and activations do it for those behind, with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from atom_core.fusion.linear import NormedLinear, NormedLinearAndGates, Stream, StreamNorm
from atom_core.fusion.mlp import GatedLinear
from atom_core.kernels.fp8_block_linear import triton_kernel as in_blocks
from atom_core.kernels.fp8_gated_activation import triton_kernel as activation_kernel
from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.fp8_linear.quantize import AS_IT_IS
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ
from atom_core.kernels.fp8_rms_norm import triton_kernel as norm_kernel
from atom_core.kernels.gated_activation.triton_kernel import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_router.triton_kernel import TritonNormedRouter
from atom_core.kernels.rms_norm.triton_kernel import rms_norm
from atom_core.kernels.select import Target
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm
from atom_core.quant import Unquantized
from atom_core.quant.fp8 import Fp8Config
from atom_core.standalone import build_runtime
from atom_core.types import Activation
from tests.unit.core.fp8_checkpoints import quantize, quantize_blocks

HIDDEN, MIDDLE, GATES, EPS = 128, 256, 6, 1e-5
BLOCKS = Fp8Config(serialized=True, block=True, scale="weight_scale_inv")
ROWS = Fp8Config(serialized=True)
STATIC = Fp8Config(serialized=True, input_scale="static")
SEPARATE = {"fp8_rms_norm": "separate", "fp8_gated_activation": "separate"}
every_format = pytest.mark.parametrize("quant", [BLOCKS, ROWS], ids=["blocks", "rows"])


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layers:
    """A norm, a product that may be gated, and what reads it."""

    def __init__(self, quant, kernels):
        # Launches overlap from sm90 on, which the interpreter knows nothing of.
        target = Target("cuda", "sm89")
        self.runtime = build_runtime(torch.device("cpu"), torch.bfloat16, 8, kernels, target=target, quant=quant)
        self.norm = RMSNorm(HIDDEN, EPS, self.runtime)
        self.norm.weight.data.copy_(1 + 0.1 * numbers(HIDDEN))
        self.gate_up, self.down = self.linear(HIDDEN, 2 * MIDDLE), self.linear(MIDDLE, HIDDEN)
        norm, activation = StreamNorm(self.norm, self.runtime), GatedActivation("silu", MIDDLE, self.runtime)
        self.normed = NormedLinear(norm, self.linear(HIDDEN, HIDDEN), None, self.runtime)
        self.gated = GatedLinear(norm, self.gate_up, activation, self.down, self.runtime)
        plain = replace(self.runtime, quant=Unquantized())
        gates = Linear(HIDDEN, GATES, False, plain)
        gates.weight.data.copy_(numbers(GATES, HIDDEN, seed=5) * HIDDEN**-0.5)
        self.with_gates = NormedLinearAndGates(norm, self.normed.linear, gates, self.runtime)

    def linear(self, inputs, outputs):
        linear = Linear(inputs, outputs, False, self.runtime)
        made = numbers(outputs, inputs, seed=outputs) * inputs**-0.5
        block = linear.weight_scale.dim() == 2
        weight, scale = quantize_blocks(made) if block else quantize(made, True, (outputs,))
        linear.weight.data.copy_(weight)
        linear.weight_scale.data.copy_(scale)
        if hasattr(linear, "input_scale"):
            linear.input_scale.data.fill_(0.01)
        linear.finalize_weights()
        return linear

    def run(self, stream):
        """What both ways to enter answer, and the stream behind the first."""
        with torch.inference_mode():
            normed, summed = self.normed(stream())
            y, also_summed = self.gated(stream())
            assert torch.equal(summed, also_summed)
            return normed, summed, self.down(y)


def streams(rows, added):
    residual, last = (numbers(rows, HIDDEN, seed=seed).bfloat16() for seed in (3, 4))
    return lambda: Stream(last.clone() if added else None, residual.clone())


@pytest.fixture
def launched(monkeypatch):
    """What quantises with what it makes, in order."""
    seen = []
    real = norm_kernel.quantized

    def watched(x, form, overlap, of):
        seen.append(("norm" if of.norm else "activation", len(x)))
        return real(x, form, overlap, of)

    monkeypatch.setattr(norm_kernel, "quantized", watched)
    monkeypatch.setattr(activation_kernel, "quantized", watched)
    return seen


every_form = pytest.mark.parametrize("form", [InputForm(E4M3, 128), InputForm(E4M3, None)], ids=["groups", "rows"])
#: More groups than a program has, and a last one that is not whole.
every_size = pytest.mark.parametrize("size", [256, 2304, 5000])


def same(found, x, form):
    """Whether that is ``x`` quantised by itself."""
    expected = norm_kernel.quantized(x, form, False, AS_IT_IS)
    return all(torch.equal(mine.float(), theirs.float()) for mine, theirs in zip(found, expected, strict=True))


@every_form
@every_size
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "a float32 norm"])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_a_norm_that_quantises_has_the_numbers_of_separate_ones(form, size, added, wide):
    # There is a gap after each row.
    x, residual = (numbers(3, size + 8, seed=seed).bfloat16()[:, :size] for seed in (1, 2))
    weight = 1 + 0.1 * numbers(size)
    weight = weight.float() if wide else weight.bfloat16()
    last, stream = x.clone(), residual.clone() if added else None
    normed, summed = rms_norm(last, weight, EPS, stream)
    given = residual if added else None
    found, total = norm_kernel.TritonFp8RmsNorm(form, overlap=False)(x, weight, EPS, given)
    assert same(found, normed, form)
    assert total is given
    if added:
        assert torch.equal(total, summed)


@every_form
@every_size
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.usefixtures("exact_fp8_casts")
def test_an_activation_that_quantises_has_the_numbers_of_separate_ones(form, size, activation):
    x = numbers(3, 2 * size + 8).bfloat16()[:, : 2 * size]
    found = activation_kernel.TritonFp8GatedActivation(activation, form, overlap=False)(x)
    assert same(found, gated_activation(x, activation), form)


@every_format
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_many_rows_are_quantised_in_front(launched, quant, added):
    rows = MAX_ROWS + 8
    given = streams(rows, added)
    expected = Layers(quant, SEPARATE).run(given)
    assert not launched
    found = Layers(quant, {}).run(given)
    assert launched == [("norm", rows), ("norm", rows), ("activation", rows)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@every_format
@pytest.mark.parametrize("rows", [1, MAX_ROWS])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_few_rows_are_their_products_to_quantise(launched, quant, added, rows):
    Layers(quant, {}).run(streams(rows, added))
    assert not launched


@every_format
@pytest.mark.parametrize("rows", [1, 2, 16, 17, MAX_ROWS + 8])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_gates_beside_a_larger_product_have_the_numbers_of_separate_ops(quant, rows, added):
    given = streams(rows, added)
    # Triton's interpreter has no products of bfloat16 matrices; torch's product is not fused with the norm.
    torch_for_gates = {"linear": "reference"}
    with torch.inference_mode():
        found = Layers(quant, torch_for_gates if added else {}).with_gates(given())
        expected = Layers(quant, {**torch_for_gates, "normed_linear": "separate"}).with_gates(given())
    # One row is not quantised where the norm is applied by the product; elsewhere the numbers are the same.
    tolerance = {"rtol": 0, "atol": 0} if rows > 1 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=0.02, atol=0.02)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_gates_that_are_quantised_are_multiplied_as_such(rows):
    layers = Layers(ROWS, {})
    norm, gates = layers.with_gates.norm, layers.linear(HIDDEN, 16)
    both = NormedLinearAndGates(norm, layers.normed.linear, gates, layers.runtime)
    stream = streams(rows, added=False)
    with torch.inference_mode():
        found = both(stream())[1]
        wanted = layers.norm(stream().residual)[0].float() @ (gates.weight.float() * gates.weight_scale[:, None]).T
    torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [E4M3, FNUZ], ids=str)
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_a_stored_value_times_its_scale_is_the_number(dtype, group):
    x, weight = numbers(3, 256).bfloat16(), (1 + 0.1 * numbers(256)).bfloat16()
    normed, _ = rms_norm(x.clone(), weight, EPS, None)
    form, gates = InputForm(dtype, group), Operands(numbers(4, 256).bfloat16(), None)
    found = [norm_kernel.TritonFp8RmsNorm(form, overlap=False)(x.clone(), weight, EPS, None)[0]]
    if group is not None:
        found.append(TritonNormedRouter(overlap=False).quantized(x, weight, EPS, gates, form)[0])
    for values, scales in found:
        each = scales if group is None else scales.T.repeat_interleave(group, 1)
        torch.testing.assert_close(values.float() * each, normed.float(), rtol=2**-3, atol=2**-7)


def test_few_tokens_have_gates_and_a_quantised_input_from_one_launch(monkeypatch):
    layers = Layers(BLOCKS, {})
    monkeypatch.setattr(layers.with_gates.norm, "kernel", None)
    monkeypatch.setattr(in_blocks, "quantize_groups", None)
    with torch.inference_mode():
        layers.with_gates(streams(4, added=False)())


@pytest.mark.usefixtures("exact_fp8_casts")
def test_rows_that_cublas_lacks_scales_of_are_quantised_with_those(launched):
    Layers(BLOCKS, {}).run(streams(MAX_ROWS + 2, True))
    assert not launched


@pytest.mark.usefixtures("exact_fp8_casts")
def test_a_static_scale_is_kept_to(launched):
    Layers(STATIC, {}).run(streams(MAX_ROWS + 8, True))
    assert not launched


def test_gfx942_without_aiter_quantises_by_itself():
    target = Target("rocm", "gfx942")
    runtime = build_runtime(torch.device("cpu"), torch.bfloat16, 8, {}, target=target, quant=BLOCKS, with_aiter=False)
    assert Linear(HIDDEN, HIDDEN, False, runtime).method.input_form() is None
