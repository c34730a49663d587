"""FP8 experts: the reference against the formula, the Triton kernels against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_block_linear.reference import quantize_groups
from atom_core.kernels.fp8_experts import FP8_EXPERTS, Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_experts.reference import ReferenceFp8Experts
from atom_core.kernels.fp8_linear.reference import E4M3, quantize_input
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

CPU, CUDA, GFX942 = Target("cpu", "x86_64"), Target("cuda", "sm90"), Target("rocm", "gfx942")
ROWS = Fp8ExpertsSpec(0, 6, 80, 48, 3, "silu", block=False, dtype=torch.float32)
BLOCKS = replace(ROWS, hidden_size=200, intermediate_size=128, block=True)
SPECS = {
    "a scale a row": ROWS,
    "a scale a row, the last of them": replace(ROWS, first=4, count=2),
    "a scale a row, sizes of a power of two": replace(ROWS, hidden_size=64, intermediate_size=32),
    "a scale a row, several tiles": replace(ROWS, hidden_size=1100, top_k=1),
    "a scale a row, nine experts a token": replace(ROWS, count=12, top_k=9),
    "a scale a block": BLOCKS,
    "a scale a block, GELU, the first of them": replace(BLOCKS, activation="gelu_tanh", count=3),
    "a scale a block, whole blocks": replace(BLOCKS, hidden_size=256, intermediate_size=256),
    "a scale a block, several tiles": replace(BLOCKS, hidden_size=1100, top_k=1),
}
#: Of one product's numbers, as a share of the largest: sums in another order, and the roundings of gate, up and result.
ONE_PRODUCT = 2**-9
#: Of a token's output, as a share of its length, for half of the tokens and for all: now and then a number of the
#: intermediate result rounds the other way in e4m3 and is off by up to an 8th, and there are dozens.
MOST, ALL = 2**-8, 2**-5
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
#: What differs on gfx942 is the form of e4m3, so few cases say all.
every_way = pytest.mark.parametrize(
    ("target", "spec"),
    [*((CUDA, spec) for spec in SPECS.values()), (GFX942, ROWS), (GFX942, BLOCKS)],
    ids=[*SPECS, "a scale a row, gfx942", "a scale a block, gfx942"],
)


def operands(spec, tokens, dtype, total=None):
    """Of ``total`` experts, six or more, of which the spec's are local; scales differ by up to 16 times."""
    total = total or max(6, spec.first + spec.count)
    generator = torch.Generator().manual_seed(0)
    hidden, size, local_experts = spec.hidden_size, spec.intermediate_size, slice(spec.first, spec.first + spec.count)

    def weight(rows, columns):
        stored = (100 * torch.randn(total, rows, columns, generator=generator)).clamp(-448, 448).to(E4M3)
        stored.view(torch.uint8).view(-1)[::37] = 0x80  # minus zeros
        return stored[local_experts].contiguous()

    def scale(rows, columns):
        shape = (total, -(-rows // 128), -(-columns // 128)) if spec.block else (total, rows)
        scales = torch.exp2(4 * torch.rand(shape, generator=generator)) / (400 * columns**0.5)
        return scales[local_experts].contiguous()

    layer = Fp8ExpertWeights(
        weight(2 * size, hidden), scale(2 * size, hidden), weight(hidden, size), scale(hidden, size)
    )
    chosen = [torch.randperm(total, generator=generator)[: spec.top_k] for _ in range(tokens)]
    experts = torch.stack(chosen).int() if tokens else torch.empty(0, spec.top_k, dtype=torch.int32)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return x, torch.rand(tokens, spec.top_k, generator=generator), experts, layer


def in_words(spec):
    """With a size that one token is multiplied by itself for: others go the way of several."""
    return replace(spec, hidden_size=-(-spec.hidden_size // 16) * 16)


def as_quantised(spec, row):
    """float64: what is left of a token."""
    stored, scale = quantize_groups(row[None]) if spec.block else quantize_input(row[None], None)
    if spec.block:
        scale = scale.repeat_interleave(128, 1)[:, : len(row)]
    return (stored.double() * scale.double())[0]


def product(spec, row, weight, scale, alone=False):
    """float64; a token ``alone`` is not quantised."""
    rows, columns = weight.shape
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns] if spec.block else scale[:, None]
    return (weight.double() * each.double()) @ (row.double() if alone else as_quantised(spec, row))


def by_definition(spec, x, weights, experts, layer, alone=False):
    """A routed token at a time."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            index = expert - spec.first
            if not 0 <= index < spec.count:
                continue
            intermediate = intermediate_of(spec, x[token], layer, expert, alone)
            y[token] += weight * product(spec, intermediate, layer.down[index], layer.down_scale[index], alone)
    return y


def assert_close(found, wanted):
    assert found.shape == wanted.shape
    if not len(found):
        return
    error = (found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1).clamp_min(1e-9)
    assert error.max() <= ALL
    assert error.median() <= MOST  # the lower one of two


def triton(spec, target, layer):
    from atom_core.kernels.fp8_experts.triton_kernel import TritonFp8Experts

    kernel = TritonFp8Experts(spec, target, overlap=False)
    kernel.adopt(layer)
    return kernel


@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_reference_is_the_definition(spec, dtype, tokens):
    spec = replace(spec, dtype=dtype)
    given = operands(spec, tokens, dtype)
    found = ReferenceFp8Experts(spec)(*given)
    assert found.dtype == dtype
    assert_close(found, by_definition(spec, *given))


@every_way
@pytest.mark.parametrize("tokens", [0, 2, 5])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_few_tokens_in_triton(spec, target, tokens):
    *given, layer = operands(spec, tokens, torch.float16)
    kernel = triton(spec, target, layer)
    assert_close(kernel(*given, layer), by_definition(spec, *given, layer))


@every_way
@pytest.mark.usefixtures("exact_fp8_casts")
def test_each_token_by_itself_in_triton(spec, target):
    spec = in_words(spec)
    *given, layer = operands(spec, 2, torch.float16)
    kernel = triton(spec, target, layer)
    found = torch.cat([kernel(*(it[token : token + 1] for it in given), layer) for token in range(2)])
    assert_close(found, by_definition(spec, *given, layer, alone=True))


@every_way
@pytest.mark.parametrize("tokens", [17, 50])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_many_tokens_in_triton(spec, target, tokens):
    *given, layer = operands(spec, tokens, torch.float16)
    kernel = triton(spec, target, layer)
    assert_close(kernel(*given, layer), ReferenceFp8Experts(spec)(*given, layer))


def intermediate_of(spec, x, layer, expert, alone=False):
    """What a local expert makes of one token, rounded as the model's dtype."""
    at = expert - spec.first
    gate_up = product(spec, x, layer.gate_up[at], layer.gate_up_scale[at], alone)
    return gated_activation(gate_up.to(x.dtype), spec.activation)


def assert_product(found, wanted):
    found, wanted = found.double(), wanted.double()
    torch.testing.assert_close(found, wanted, rtol=ONE_PRODUCT, atol=ONE_PRODUCT * wanted.abs().max().item())


def local_routed_tokens(spec, experts):
    """(place among all routed tokens, token, expert) of those that are local."""
    routed_tokens = enumerate(experts.flatten().tolist())
    return [(at, at // spec.top_k, it) for at, it in routed_tokens if spec.first <= it < spec.first + spec.count]


def quantized_in_triton(spec, x):
    from atom_core.kernels.fp8_block_linear.quantize import quantize_groups as launch

    return launch(x, E4M3, overlap=False, group=128 if spec.block else None)


def weighted_outputs(spec, intermediate, weights, experts, layer, alone=False):
    """float64 of each routed token that is local."""
    outputs = []
    for routed_token, _, expert in local_routed_tokens(spec, experts):
        at = expert - spec.first
        output = product(spec, intermediate[routed_token], layer.down[at], layer.down_scale[at], alone)
        outputs.append(weights.flatten()[routed_token].double() * output)
    return outputs


@every_spec
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.usefixtures("exact_fp8_casts")
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32], ids=str)
def test_each_product_of_one_token_in_triton(normed, spec, norm_dtype):
    from atom_core.kernels.experts.grouped import LocalExperts
    from atom_core.kernels.fp8_experts.few_tokens import down_of_one, gate_up_of_one
    from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
    from atom_core.kernels.linear.triton_kernel import Norm

    spec = in_words(spec)
    x, weights, experts, layer = operands(spec, 1, torch.float16)
    experts[0, 0] = spec.first  # one at least is local
    norm = Norm(torch.rand(spec.hidden_size).to(norm_dtype) + 0.5, 1e-5) if normed else None
    row = x if norm is None else rms_norm(x, norm.weight, norm.eps, None)[0]
    common = {"block": 128 if spec.block else 0, "overlap": False, "nvidia": True}
    local_experts, activation = LocalExperts(spec.first, spec.count, spec.top_k), ACTIVATIONS[spec.activation]
    given = (x, experts, layer.gate_up, layer.gate_up_scale, local_experts)
    found = gate_up_of_one(*given, activation=activation, norm=norm, **common)
    routed_tokens = local_routed_tokens(spec, experts)
    wanted = torch.stack([intermediate_of(spec, row[0], layer, expert, alone=True) for *_, expert in routed_tokens])
    assert_product(found[[it for it, *_ in routed_tokens]], wanted)
    intermediate = torch.full((spec.top_k, spec.intermediate_size), float("nan"), dtype=torch.float16)
    places, size = [it for it, *_ in routed_tokens], spec.intermediate_size
    intermediate[places] = torch.randn(len(places), size).to(torch.float16)
    residual = x.clone() if normed else None
    found = down_of_one(
        intermediate, weights, experts, layer.down, layer.down_scale, local_experts, residual=residual, **common
    )
    assert found is residual or not normed
    wanted = sum(weighted_outputs(spec, intermediate, weights, experts, layer, alone=True))[None]
    assert_product(found, wanted + x.double() if normed else wanted)


@every_spec
@pytest.mark.usefixtures("exact_fp8_casts")
def test_each_product_of_few_tokens_in_triton(spec):
    from atom_core.kernels.experts.grouped import LocalExperts
    from atom_core.kernels.fp8_experts.few_tokens import multiply_of_experts
    from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS

    x, weights, experts, layer = operands(spec, 5, torch.float16)
    common = {"block": 128 if spec.block else 0, "overlap": False, "nvidia": True}
    local_experts, activation = LocalExperts(spec.first, spec.count, spec.top_k), ACTIVATIONS[spec.activation]
    routed_tokens = local_routed_tokens(spec, experts)
    places = [it for it, *_ in routed_tokens]
    found = torch.full((experts.numel(), spec.intermediate_size), float("nan"), dtype=torch.float16)
    given = (*quantized_in_triton(spec, x), experts, None, layer.gate_up, layer.gate_up_scale, found, local_experts)
    multiply_of_experts(*given, activation=activation, **common)
    wanted = torch.stack([intermediate_of(spec, x[token], layer, expert) for _, token, expert in routed_tokens])
    assert_product(found[places], wanted)
    intermediate = torch.full((experts.numel(), spec.intermediate_size), float("nan"), dtype=torch.float16)
    intermediate[places] = torch.randn(len(places), spec.intermediate_size).to(torch.float16)
    outputs = torch.full((experts.numel(), spec.hidden_size), float("nan"))
    down = (layer.down, layer.down_scale, outputs, local_experts)
    given = (*quantized_in_triton(spec, intermediate), experts, weights, *down)
    multiply_of_experts(*given, activation=None, **common)
    assert_product(outputs[places], torch.stack(weighted_outputs(spec, intermediate, weights, experts, layer)))
    elsewhere = torch.ones(len(outputs), dtype=torch.bool)
    elsewhere[places] = False
    assert outputs[elsewhere].isnan().all()


@pytest.mark.parametrize("tokens", [0, 1, 5, 20])
@pytest.mark.parametrize("spec", [ROWS, replace(BLOCKS, first=2, count=3)], ids=["rows", "some, blocks"])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_answers_are_added_to_a_residual(spec, tokens):
    *given, layer = operands(spec, tokens, torch.float16)
    residual = torch.randn(tokens, spec.hidden_size).to(torch.float16)
    alone = tokens == 1 and spec == in_words(spec)
    wanted = residual.double() + by_definition(spec, *given, layer, alone=alone)
    found = triton(spec, CUDA, layer).add(*given, layer, residual)
    assert found is residual
    assert_close(found, wanted)


@pytest.mark.parametrize("spec", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.usefixtures("exact_fp8_casts")
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32], ids=str)
def test_one_token_is_normed_on_the_way(spec, norm_dtype):
    spec = replace(in_words(spec), dtype=torch.float16)
    x, weights, experts, layer = operands(spec, 5, torch.float16)
    norm = torch.rand(spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(norm_dtype) + 0.5
    normed = rms_norm(x, norm, 1e-5, None)[0]
    wanted = x.double() + by_definition(spec, normed, weights, experts, layer, alone=True)
    kernel, found = triton(spec, CUDA, layer), []
    assert kernel.max_normed == 1
    for token in range(5):
        one = slice(token, token + 1)
        stream = x[one].clone()
        found.append(kernel.add_after_norm(stream, norm, 1e-5, weights[one], experts[one], layer))
        assert found[-1] is stream
    assert_close(torch.cat(found), wanted)


@pytest.mark.parametrize(
    "spec",
    [ROWS, replace(BLOCKS, dtype=torch.float16), replace(ROWS, dtype=torch.float16)],
    ids=["float32", "a size of no whole words", "a row that begins within a word"],
)
@pytest.mark.usefixtures("exact_fp8_casts")
def test_one_token_that_is_not_read_in_words(spec):
    x, weights, experts, layer = operands(spec, 1, spec.dtype)
    wide = torch.full((1, spec.hidden_size + 3), float("nan"), dtype=spec.dtype)
    wide[:, 3:] = x
    kernel = triton(spec, CUDA, layer)
    assert kernel.max_normed == (spec == replace(ROWS, dtype=torch.float16))
    wanted = by_definition(spec, x, weights, experts, layer)
    assert_close(kernel(wide[:, 3:], weights, experts, layer), wanted)


@every_spec
@pytest.mark.usefixtures("exact_fp8_casts")
def test_each_product_of_many_tokens_in_triton(spec):
    from atom_core.kernels.experts.grouped import LocalExperts, sort_by_expert
    from atom_core.kernels.fp8_experts.many_tokens import multiply_blocks
    from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS

    x, weights, experts, layer = operands(spec, 20, torch.float16)
    blocks = sort_by_expert(experts, LocalExperts(spec.first, spec.count, spec.top_k), 16)
    common = {"top_k": spec.top_k, "block": 128 if spec.block else 0, "nvidia": True, "overlap": False}
    slots = blocks.slots.tolist()
    routed_tokens = local_routed_tokens(spec, experts)[:20]
    found = torch.full((len(slots), spec.intermediate_size), float("nan"), dtype=torch.float16)
    multiply_blocks(
        *quantized_in_triton(spec, x),
        blocks,
        None,
        layer.gate_up,
        layer.gate_up_scale,
        found,
        activation=ACTIVATIONS[spec.activation],
        **common,
    )
    wanted = torch.stack([intermediate_of(spec, x[token], layer, expert) for _, token, expert in routed_tokens])
    assert_product(found[[slots.index(routed_token) for routed_token, *_ in routed_tokens]], wanted)
    intermediate = torch.randn(len(slots), spec.intermediate_size).to(torch.float16)
    intermediate[torch.tensor(slots) < 0] = float("nan")
    outputs = torch.full((experts.numel(), spec.hidden_size), float("nan"), dtype=torch.float16)
    given = (*quantized_in_triton(spec, intermediate), blocks, weights, layer.down, layer.down_scale, outputs)
    multiply_blocks(*given, activation=None, **common)
    wanted = []
    for routed_token, _, expert in routed_tokens:
        at = expert - spec.first
        output = product(spec, intermediate[slots.index(routed_token)], layer.down[at], layer.down_scale[at])
        wanted.append(weights.flatten()[routed_token].double() * output)
    assert_product(outputs[[it for it, *_ in routed_tokens]], torch.stack(wanted))


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("spec", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_a_token_with_nan_is_nan_and_its_neighbours_are_not(spec, tokens):
    x, weights, experts, layer = operands(spec, tokens, torch.float16)
    x[1, 5] = float("nan")
    for kernel in (ReferenceFp8Experts(spec), triton(spec, CUDA, layer)):
        y = kernel(x, weights, experts, layer)
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_what_stands_behind_the_rows_is_not_read(tokens):
    *given, layer = operands(BLOCKS, tokens, torch.float16)
    x = torch.full((2 * tokens, 208), float("nan"), dtype=torch.float16)
    x[:tokens, :200] = given[0]
    found = triton(BLOCKS, CUDA, layer)(x[:tokens, :200], *given[1:], layer)
    assert_close(found, ReferenceFp8Experts(BLOCKS)(*given, layer))


def test_ranks_that_hold_some_experts_each_add_up_to_one_that_holds_all():
    x, weights, experts, layer = operands(BLOCKS, 7, torch.float32)
    whole = ReferenceFp8Experts(BLOCKS)(x, weights, experts, layer)
    parts = []
    for first, count in ((0, 2), (2, 3), (5, 1)):
        local_experts = Fp8ExpertWeights(*(it[first : first + count] for it in layer))
        parts.append(ReferenceFp8Experts(replace(BLOCKS, first=first, count=count))(x, weights, experts, local_experts))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "implementation"), [(CPU, "reference"), (CUDA, "triton"), (GFX942, "triton")], ids=str
)
def test_who_runs_it(target, implementation):
    kernels = kernel_set(target, with_aiter=False)
    kernels.select(FP8_EXPERTS, BLOCKS)
    assert kernels.choices()[0].implementation == implementation


def test_a_gpu_that_multiplies_no_fp8_is_refused():
    with pytest.raises(ValueError, match=r"No implementation of fp8_experts .* from sm89 on, not on sm80"):
        kernel_set(Target("cuda", "sm80")).select(FP8_EXPERTS, BLOCKS)
