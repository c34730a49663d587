"""The experts of a mixture: the reference against the formula, the Triton kernels against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.experts import EXPERTS, ExpertsSpec, ExpertWeights
from atom_core.kernels.experts.mkldnn import MkldnnExperts
from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear import mkldnn, widened
from atom_core.kernels.linear.mkldnn import multiplies
from atom_core.kernels.linear.widened import widened_linear
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

CPU = Target("cpu", "x86_64")

SPEC = ExpertsSpec(0, 6, 40, 24, 3, "silu", bias=False, dtype=torch.float32)
SPECS = {
    "all experts": SPEC,
    "with biases": replace(SPEC, bias=True),
    "GELU": replace(SPEC, activation="gelu_tanh"),
    "clamped SwiGLU, with biases": replace(SPEC, activation="clamped_swiglu", bias=True),
    "one expert a token": replace(SPEC, top_k=1),
    "nine experts a token": replace(SPEC, count=12, top_k=9),
    "the first of them": replace(SPEC, count=3),
    "the last of them, with biases": replace(SPEC, first=4, count=2, bias=True),
    "sizes of a power of two": replace(SPEC, hidden_size=64, intermediate_size=32),
    "several tiles of gate and up": replace(SPEC, hidden_size=1100, top_k=1),
    "several tiles of down": replace(SPEC, intermediate_size=1040, top_k=1),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8}
#: Gate and up, what they make and the output are rounded, each.
TOLERANCE_PACKED = 2**-6


def operands(spec, tokens, dtype, total=None):
    """Of ``total`` experts, six or more, of which the spec's are local."""
    total = total or max(6, spec.first + spec.count)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    hidden, size, local_experts = spec.hidden_size, spec.intermediate_size, slice(spec.first, spec.first + spec.count)
    layer = ExpertWeights(
        (random(total, 2 * size, hidden) / hidden**0.5)[local_experts].contiguous(),
        (random(total, hidden, size) / size**0.5)[local_experts].contiguous(),
        random(total, 2 * size)[local_experts].contiguous() if spec.bias else None,
        random(total, hidden)[local_experts].contiguous() if spec.bias else None,
    )
    chosen = [torch.randperm(total, generator=generator)[: spec.top_k] for _ in range(tokens)]
    experts = torch.stack(chosen).int() if tokens else torch.empty(0, spec.top_k, dtype=torch.int32)
    return random(tokens, hidden), torch.rand(tokens, spec.top_k, generator=generator), experts, layer


def by_definition(spec, x, weights, experts, layer):
    """float64, a routed token at a time."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            index = expert - spec.first
            if not 0 <= index < spec.count:
                continue
            intermediate = layer.gate_up[index].double() @ x[token].double()
            intermediate += 0 if layer.gate_up_bias is None else layer.gate_up_bias[index].double()
            output = layer.down[index].double() @ gated_activation(intermediate, spec.activation)
            output += 0 if layer.down_bias is None else layer.down_bias[index].double()
            y[token] += weight * output
    return y


def assert_close(found, wanted):
    tolerance = TOLERANCE[found.dtype]
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * largest)


every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_spec
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_reference_is_the_definition(spec, dtype, tokens):
    given = operands(spec, tokens, dtype)
    assert_close(ReferenceExperts(spec)(*given), by_definition(spec, *given))


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="oneDNN multiplies no bfloat16 on this processor")
@every_spec
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
def test_packed_experts_are_the_reference_and_need_the_layers_matrices_no_more(spec, tokens):
    spec = replace(spec, dtype=torch.bfloat16)
    x, weights, experts, layer = operands(spec, tokens, torch.bfloat16)
    wanted = by_definition(spec, x, weights, experts, layer)
    kernel = kernel_set(CPU).select(EXPERTS, spec)
    assert isinstance(kernel, MkldnnExperts)
    assert kernel.adopt(layer)
    gone = layer._replace(gate_up=layer.gate_up.new_empty(0), down=layer.down.new_empty(0))
    found = kernel(x, weights, experts, gone)
    largest = wanted.abs().max().item() if tokens else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE_PACKED, atol=TOLERANCE_PACKED * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_not_packed_on_a_cpu_is_the_references(dtype):
    kernel = kernel_set(CPU).select(EXPERTS, replace(SPEC, dtype=dtype))
    assert isinstance(kernel, ReferenceExperts)
    assert not kernel.adopt(operands(SPEC, 1, dtype)[3])


@every_spec
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
def test_widened_experts_are_the_reference(spec, tokens):
    given = operands(spec, tokens, torch.float16)
    assert_close(ReferenceExperts(spec, widened_linear)(*given), by_definition(spec, *given))


def test_experts_are_widened_on_a_processor_without_products_in_their_dtype(monkeypatch):
    for module in (mkldnn, widened):
        monkeypatch.setattr(module, "multiplies", lambda dtype: False)
    kernels = kernel_set(CPU)
    wanted = {torch.bfloat16: "widened", torch.float16: "widened", torch.float32: "reference"}
    assert {dtype: kernels.chosen(EXPERTS, replace(SPEC, dtype=dtype)) for dtype in wanted} == wanted


@every_spec
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_few_tokens_in_triton(spec, dtype, tokens):
    from atom_core.kernels.experts.triton_kernel import TritonExperts

    given = operands(spec, tokens, dtype)
    assert_close(TritonExperts(spec, overlap=False)(*given), by_definition(spec, *given))


@every_spec
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [17, 90])
def test_many_tokens_in_triton(spec, dtype, tokens):
    from atom_core.kernels.experts.triton_kernel import TritonExperts

    given = operands(spec, tokens, dtype)
    assert_close(TritonExperts(spec, overlap=False)(*given), by_definition(spec, *given))


@pytest.mark.parametrize("tokens", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, total=SPEC.count), SPECS["the last of them, with biases"]],
    ids=["all", "all there are", "some"],
)
def test_answers_are_added_to_a_residual(spec, tokens):
    from atom_core.kernels.experts.triton_kernel import TritonExperts

    given = operands(spec, tokens, torch.float32)
    residual = torch.randn(tokens, spec.hidden_size)
    wanted = residual.double() + by_definition(spec, *given)
    found = TritonExperts(spec, overlap=False).add(*given, residual)
    assert found is residual
    assert_close(found, wanted)


@every_spec
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "a float32 norm"])
def test_one_token_is_normed_on_the_way(spec, dtype, wide):
    from atom_core.kernels.experts.triton_kernel import TritonExperts

    x, weights, experts, layer = operands(spec, 1, dtype)
    norm = torch.rand(spec.hidden_size) + 0.5
    norm = norm if wide else norm.to(dtype)
    normed = rms_norm(x, norm, 1e-5, None)[0]
    wanted = x.double() + by_definition(spec, normed, weights, experts, layer)
    stream = x.clone()
    found = TritonExperts(spec, overlap=False).add_after_norm(stream, norm, 1e-5, weights, experts, layer)
    assert found is stream
    assert_close(found, wanted)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_a_token_of_nan_leaves_its_neighbours_alone(tokens):
    from atom_core.kernels.experts.triton_kernel import TritonExperts

    x, weights, experts, layer = operands(SPEC, tokens, torch.float32)
    experts[:] = torch.tensor([5, 4, 0])  # all through the same
    wanted = by_definition(SPEC, x, weights, experts, layer)
    x[-1] = torch.nan
    found = TritonExperts(SPEC, overlap=False)(x, weights, experts, layer)
    assert found[-1].isnan().all()
    if tokens > 1:
        assert_close(found[:-1], wanted[:-1])


@pytest.mark.parametrize("max_one_launch", [0, 2048], ids=["in several launches", "in one launch"])
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("tokens", [1, 20, 300])
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("spec", [SPEC, SPECS["the last of them, with biases"]], ids=["all", "some"])
def test_every_routed_token_is_in_one_block_of_its_expert(monkeypatch, spec, shared, tokens, rows, max_one_launch):
    from atom_core.kernels.experts import grouped
    from atom_core.kernels.experts.grouped import LocalExperts, sort_by_expert

    monkeypatch.setattr(grouped, "_MAX_ONE_LAUNCH", max_one_launch)
    experts = operands(spec, tokens, torch.float32)[2]
    if tokens == 300:
        experts[:] = torch.tensor([5, 4, 0])  # as uneven as can be
    spec = replace(spec, count=spec.count + shared, top_k=spec.top_k + shared)
    last = spec.first + spec.count
    experts = torch.cat([experts, torch.arange(last - shared, last, dtype=torch.int32).expand(tokens, -1)], 1)
    blocks = sort_by_expert(experts, LocalExperts(spec.first, spec.count, spec.top_k, shared=shared), rows)
    local_experts = {
        routed_token
        for routed_token, expert in enumerate(experts.flatten().tolist())
        if spec.first <= expert < spec.first + spec.count
    }
    found = []
    for expert, slots in zip(blocks.experts.tolist(), blocks.slots.view(-1, rows).tolist(), strict=True):
        routed_tokens = [routed_token for routed_token in slots if routed_token >= 0]
        assert all(routed_token == -1 for routed_token in slots if routed_token < 0)
        assert bool(routed_tokens) == (expert >= 0)
        assert all(experts.flatten()[routed_token] == expert + spec.first for routed_token in routed_tokens)
        found += routed_tokens
    assert sorted(found) == sorted(local_experts)


def test_ranks_that_hold_some_experts_each_add_up_to_one_that_holds_all():
    x, weights, experts, layer = operands(SPEC, 7, torch.float32)
    whole = ReferenceExperts(SPEC)(x, weights, experts, layer)
    parts = []
    for first, count in ((0, 2), (2, 3), (5, 1)):
        local_experts = ExpertWeights(layer.gate_up[first : first + count], layer.down[first : first + count])
        parts.append(ReferenceExperts(replace(SPEC, first=first, count=count))(x, weights, experts, local_experts))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
def test_weights_whose_tiles_lie_together_give_the_same(monkeypatch, tokens, bias):
    """As on Hopper, by kernels for any GPU."""
    from atom_core.kernels.experts import triton_kernel

    monkeypatch.setattr(triton_kernel, "on_hopper", lambda device: True)
    spec = ExpertsSpec(0, 6, 192, 128, 3, "silu", bias, torch.float16)
    *given, layer = operands(spec, tokens, torch.float16)
    kernel = triton_kernel.TritonExperts(spec, overlap=False)
    wanted = kernel(*given, layer)
    moved = layer._replace(gate_up=layer.gate_up.clone(), down=layer.down.clone())
    assert not kernel.adopt(moved), "the layer's matrices are still needed"
    tile = layer.gate_up[2, 64:128, 128:]  # the last of the second row of three
    assert torch.equal(moved.gate_up[2].flatten()[5 * 4096 : 6 * 4096], tile.flatten())
    assert torch.equal(kernel(*given, moved), wanted)


@pytest.mark.parametrize("size", [1024, 1088])
def test_a_wide_middle_of_one_token_has_tiles_of_its_own_where_weights_lie_together(monkeypatch, size):
    from atom_core.kernels.experts import triton_kernel

    monkeypatch.setattr(triton_kernel, "on_hopper", lambda device: True)
    spec = ExpertsSpec(0, 6, 192, size, 3, "silu", True, torch.float16)
    *given, layer = operands(spec, 1, torch.float16)
    wanted = by_definition(spec, *given, layer)
    kernel = triton_kernel.TritonExperts(spec, overlap=False)
    kernel.adopt(layer)
    assert_close(kernel(*given, layer), wanted)
