"""Mixtures of experts on this GPU: routing and experts against the references, and in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.kernels.experts.triton_kernel import TritonExperts
from atom_core.kernels.moe_routing.reference import route
from atom_core.kernels.moe_routing.triton_kernel import route as launch
from atom_core.kernels.mxfp4_experts import Mxfp4ExpertsSpec, Mxfp4Weights, empty_scales
from atom_core.kernels.mxfp4_experts.reference import ReferenceMxfp4Experts
from atom_core.kernels.mxfp4_experts.triton_kernel import TritonMxfp4Experts
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps
from atom_core.types import RoutingConfig

GPU = torch.device("cuda")
OVERLAP = overlaps(Target.of(GPU))

ROUTING = {
    "Qwen3": RoutingConfig(128, 8, "softmax", renormalize=True),
    "Mixtral": RoutingConfig(8, 2, "softmax", renormalize=True),
    "GLM 4.5": RoutingConfig(128, 8, "sigmoid", True, True, 2.5),
    "DeepSeek V3": RoutingConfig(256, 8, "sigmoid", True, True, 2.5, 8, 4),
    "DeepSeek V2": RoutingConfig(60, 6, "softmax", False, False, 16.0, 6, 3, "largest"),
    "Kimi K2": RoutingConfig(384, 8, "sigmoid", True, True, 2.827),
    "DeepSeek V3, one shared": RoutingConfig(256, 8, "sigmoid", True, True, 2.5, 8, 4, shared=1),
    "DeepSeek V2 Lite, two shared": RoutingConfig(64, 6, "softmax", renormalize=False, shared=2),
    "Qwen3-Next, one shared with a gate": RoutingConfig(512, 10, "softmax", True, shared=1, shared_gate=True),
}
SMALL = ExpertsSpec(0, 6, 1100, 1040, 3, "silu", bias=True, dtype=torch.bfloat16)
SPECS = {
    "odd sizes, with biases": SMALL,
    "some of them": replace(SMALL, first=2, count=3),
    "some of them, of whole lines": replace(SMALL, first=2, count=3, intermediate_size=704),
    "a narrow intermediate size": replace(SMALL, intermediate_size=64),
    "GELU": replace(SMALL, activation="gelu_tanh", hidden_size=256, intermediate_size=96),
    "GPT-OSS 20B": ExpertsSpec(0, 32, 2880, 2880, 4, "clamped_swiglu", bias=True, dtype=torch.bfloat16),
    "Qwen3 30B": ExpertsSpec(0, 128, 2048, 768, 8, "silu", bias=False, dtype=torch.bfloat16),
    "Qwen3 30B, all of them": ExpertsSpec(0, 128, 2048, 768, 8, "silu", False, torch.bfloat16, total=128),
    "DeepSeek V2-Lite": ExpertsSpec(0, 66, 2048, 1408, 8, "silu", bias=False, dtype=torch.bfloat16),
    "nine of a token": ExpertsSpec(0, 129, 1024, 704, 9, "silu", bias=False, dtype=torch.bfloat16),
}

MXFP4_SPECS = {
    "GPT-OSS 20B": Mxfp4ExpertsSpec(**vars(SPECS["GPT-OSS 20B"])),
    "some of them": Mxfp4ExpertsSpec(
        **vars(replace(SMALL, first=2, count=3, hidden_size=1120, intermediate_size=1056))
    ),
    "last tiles that are smaller": Mxfp4ExpertsSpec(
        **vars(replace(SMALL, first=2, count=3, hidden_size=576, intermediate_size=1088))
    ),
}


@pytest.mark.parametrize("spec", ROUTING.values(), ids=ROUTING)
@pytest.mark.parametrize("tokens", [1, 9, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_is_the_reference(spec, tokens, dtype):
    torch.manual_seed(0)
    wide = torch.full((tokens, spec.num_logits + 8), float("nan"), dtype=dtype, device=GPU)
    # Equal scores are nobody's choice: bfloat16 has few numbers, so each has its own.
    order = torch.rand(tokens, spec.num_experts, device=GPU).argsort(-1)
    wide[:, : spec.num_experts] = (order.float() - spec.num_experts / 2) / 16
    wide[:, spec.num_experts : spec.num_experts + spec.shared_gate] = torch.randn(tokens, 1, device=GPU)
    logits = wide[:, : spec.num_logits]
    correction = torch.rand(spec.num_experts, device=GPU) * 1e-3 if spec.correction else None
    weights, experts = launch(logits, correction, spec, OVERLAP)
    wanted_weights, wanted = route(logits, correction, spec)
    found = torch.zeros(tokens, spec.total_experts, device=GPU).scatter_(1, experts.long(), weights)
    expected = torch.zeros_like(found).scatter_(1, wanted.long(), wanted_weights)
    # Where a sum with the correction is as large as another but for rounding, either expert is right.
    clear = torch.ones(tokens, dtype=torch.bool, device=GPU)
    for _ in range(20):
        nearly = logits.float() * (1 + 1e-5 * torch.randn_like(logits, dtype=torch.float32))
        # Large logits have scores of almost 1, which that does not move.
        beside = None if correction is None else correction + 2.5e-7 * torch.randn_like(correction)
        clear &= (route(nearly, beside, spec)[1].sort(-1)[0] == wanted.sort(-1)[0]).all(-1)
    assert (~clear).sum() <= max(1, 0.05 * tokens)
    torch.testing.assert_close(found[clear], expected[clear], rtol=1e-5, atol=1e-7)


def test_rows_of_nan_choose_as_many_experts_as_others():
    spec = ROUTING["DeepSeek V3"]
    logits = torch.full((2, spec.num_experts), float("nan"), device=GPU)
    _, experts = launch(logits, torch.zeros(spec.num_experts, device=GPU), spec, OVERLAP)
    for row in experts.tolist():
        assert len(set(row)) == spec.top_k
        assert all(0 <= expert < spec.num_experts for expert in row)


def operands(spec, tokens, total=None):
    torch.manual_seed(0)
    total = total or spec.total or spec.first + spec.count + 1
    hidden, size, dtype = spec.hidden_size, spec.intermediate_size, spec.dtype
    wide = torch.full((tokens, hidden + 8), float("nan"), dtype=dtype, device=GPU)
    wide[:, :hidden] = torch.randn(tokens, hidden, device=GPU)
    layer = ExpertWeights(
        torch.randn(spec.count, 2 * size, hidden, device=GPU).div_(hidden**0.5).to(dtype),
        torch.randn(spec.count, hidden, size, device=GPU).div_(size**0.5).to(dtype),
        torch.randn(spec.count, 2 * size, device=GPU).to(dtype) if spec.bias else None,
        torch.randn(spec.count, hidden, device=GPU).to(dtype) if spec.bias else None,
    )
    experts = torch.rand(tokens, total, device=GPU).argsort(-1)[:, : spec.top_k].int().contiguous()
    return wide[:, :hidden], torch.rand(tokens, spec.top_k, device=GPU), experts, layer


def plain_experts(spec, layer, blocked=True):
    """A kernel, and the layer as it wants it, or as it was."""
    kernel = TritonExperts(spec, OVERLAP)
    if not blocked:
        return kernel, layer
    layer = layer._replace(gate_up=layer.gate_up.clone(), down=layer.down.clone())
    kernel.adopt(layer)
    return kernel, layer


def assert_close(found, wanted):
    atol = 2**-7 * wanted.abs().max().item()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=atol)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("tokens", [1, 3, 8, MAX_TOKENS, MAX_TOKENS + 1, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_are_the_reference(spec, tokens, dtype):
    spec = replace(spec, dtype=dtype)
    *given, layer = operands(spec, tokens)
    kernel, moved = plain_experts(spec, layer)
    assert_close(kernel(*given, moved), ReferenceExperts(spec)(*given, layer))


@pytest.mark.parametrize(
    ("spec", "shared"),
    [
        (SPECS["some of them, of whole lines"], 0),
        (SPECS["a narrow intermediate size"], 0),
        (SPECS["GPT-OSS 20B"], 0),
        (SPECS["Qwen3 30B"], 0),
        (SPECS["DeepSeek V2-Lite"], 2),
        (SPECS["nine of a token"], 1),
    ],
    ids=["some", "narrow", "GPT-OSS 20B", "Qwen3 30B", "DeepSeek V2-Lite, two shared", "one shared"],
)
@pytest.mark.parametrize("tokens", [17, 33, 64, 65, 128, 250, 256, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("blocked", [False, True], ids=["as loaded", "blocked"])
def test_rows_that_can_be_copied_16_bytes_at_a_time_go_through_the_same(spec, shared, tokens, dtype, blocked):
    """Hidden sizes of whole lines, in rows that lie so: what Hopper's own kernels are for."""
    if spec.hidden_size % 64:
        spec = replace(spec, hidden_size=1088)
    spec = replace(spec, dtype=dtype, shared=shared)
    routed = spec.first + spec.count - shared
    x, weights, experts, layer = operands(spec, tokens, routed + (0 if shared else 1))
    if shared:
        experts[:, -shared:] = torch.arange(routed, routed + shared, device=GPU)
    padded = torch.full((tokens, spec.hidden_size + 16), float("nan"), dtype=dtype, device=GPU)
    padded[:, : spec.hidden_size] = x
    given = padded[:, : spec.hidden_size], weights, experts
    kernel, moved = plain_experts(spec, layer, blocked)
    assert_close(kernel(*given, moved), ReferenceExperts(spec)(*given, layer))


@pytest.mark.parametrize("tokens", [1, 9, 40, 300])
def test_answers_are_added_to_a_residual(tokens):
    spec = SPECS["Qwen3 30B"]
    *given, layer = operands(spec, tokens)
    residual = torch.randn(tokens, spec.hidden_size, device=GPU).to(spec.dtype)
    wanted = residual.float() + ReferenceExperts(spec)(*given, layer).float()
    kernel, moved = plain_experts(spec, layer)
    assert_close(kernel.add(*given, moved, residual), wanted)


@pytest.mark.parametrize("tokens", [1, 2, MAX_TOKENS, 40])
def test_tokens_that_go_to_others_experts_alone_get_nothing(tokens):
    spec = replace(SPECS["Qwen3 30B"], first=64, count=64)
    x, weights, experts, layer = operands(spec, tokens)
    residual = torch.randn(tokens, spec.hidden_size, device=GPU).to(spec.dtype)
    found = TritonExperts(spec, OVERLAP).add(x, weights, experts % 64, layer, residual.clone())
    assert torch.equal(found, residual)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_token_is_normed_on_the_way(spec):
    _, weights, experts, layer = operands(spec, 1)
    stream = torch.randn(1, spec.hidden_size, device=GPU).to(spec.dtype)
    norm = torch.rand(spec.hidden_size, device=GPU).to(spec.dtype) + 0.5
    normed = rms_norm(stream, norm, 1e-6, None)[0]
    wanted = stream.float() + ReferenceExperts(spec)(normed, weights, experts, layer).float()
    kernel, moved = plain_experts(spec, layer)
    assert_close(kernel.add_after_norm(stream, norm, 1e-6, weights, experts, moved), wanted)


def in_mxfp4(spec, tokens):
    """As :func:`operands`, of all codes, and of scales that differ."""
    x, weights, experts, plain = operands(spec, tokens)
    packed = []
    for count, rows, columns in (it.shape for it in plain[:2]):
        scales = empty_scales(count, rows, columns, GPU)
        scales.copy_(torch.randint(117, 122, scales.shape, dtype=torch.uint8, device=GPU))
        packed += [torch.randint(256, (count, rows, columns // 2), dtype=torch.uint8, device=GPU), scales]
    return x, weights, experts, Mxfp4Weights(*packed, plain.gate_up_bias, plain.down_bias)


def adopted(spec, layer):
    """A kernel, and the layer as it wants it."""
    kernel = TritonMxfp4Experts(spec, OVERLAP)
    layer = layer._replace(gate_up=layer.gate_up.clone(), down=layer.down.clone())
    kernel.adopt(layer)
    return kernel, layer


@pytest.mark.parametrize("spec", MXFP4_SPECS.values(), ids=MXFP4_SPECS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, MAX_TOKENS, MAX_TOKENS + 1, 300, 600, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts_in_mxfp4_are_the_reference(spec, tokens, dtype):
    spec = replace(spec, dtype=dtype)
    *given, layer = in_mxfp4(spec, tokens)
    kernel, moved = adopted(spec, layer)
    assert_close(kernel(*given, moved), ReferenceMxfp4Experts(spec)(*given, layer))


@pytest.mark.parametrize("tokens", [3, 300])
def test_experts_in_mxfp4_may_have_rounded_inputs(tokens):
    spec = Mxfp4ExpertsSpec(**vars(SPECS["Qwen3 30B"]), rounded_inputs=True)
    *given, layer = in_mxfp4(spec, tokens)
    kernel, moved = adopted(spec, layer)
    found, wanted = kernel(*given, moved), ReferenceMxfp4Experts(spec)(*given, layer)
    # Where sums in another order move a number of the intermediate result over a tie, four bits make more of it.
    error = (found - wanted).float().square().mean().sqrt() / wanted.float().square().mean().sqrt()
    assert error < 0.05


@pytest.mark.parametrize("tokens", [1, 9, 40, 300])
def test_answers_of_mxfp4_are_added_to_a_residual(tokens):
    spec = MXFP4_SPECS["GPT-OSS 20B"]
    *given, layer = in_mxfp4(spec, tokens)
    residual = torch.randn(tokens, spec.hidden_size, device=GPU).to(spec.dtype)
    wanted = residual.float() + ReferenceMxfp4Experts(spec)(*given, layer).float()
    kernel, moved = adopted(spec, layer)
    assert_close(kernel.add(*given, moved, residual), wanted)


@pytest.mark.parametrize("spec", MXFP4_SPECS.values(), ids=MXFP4_SPECS)
def test_one_token_is_normed_in_front_of_mxfp4(spec):
    _, weights, experts, layer = in_mxfp4(spec, 1)
    stream = torch.randn(1, spec.hidden_size, device=GPU).to(spec.dtype)
    norm = torch.rand(spec.hidden_size, device=GPU).to(spec.dtype) + 0.5
    normed = rms_norm(stream, norm, 1e-6, None)[0]
    wanted = stream.float() + ReferenceMxfp4Experts(spec)(normed, weights, experts, layer).float()
    kernel, moved = adopted(spec, layer)
    assert_close(kernel.add_after_norm(stream, norm, 1e-6, weights, experts, moved), wanted)


@pytest.mark.parametrize("tokens", [1, 9, 64])
@pytest.mark.parametrize("offset", [-40, 60])
def test_scales_in_mxfp4_may_be_small_and_large(tokens, offset):
    spec = replace(MXFP4_SPECS["GPT-OSS 20B"], activation="silu", bias=False)
    x, weights, experts, layer = in_mxfp4(spec, tokens)
    layer.down_scale.add_(offset)
    kernel, moved = adopted(spec, layer)
    # As one number for both: of such sizes, none of theirs is compared with 1.
    found = kernel(x, weights, experts, moved).double()
    wanted = ReferenceMxfp4Experts(spec)(x, weights, experts, layer).double()
    assert_close(found * 2.0**-offset, wanted * 2.0**-offset)


@pytest.mark.parametrize("tokens", [2, 64])
def test_a_graph_of_mxfp4_fits_other_routing_than_it_was_captured_with(tokens):
    spec = MXFP4_SPECS["GPT-OSS 20B"]
    kernel, (x, weights, experts, layer) = TritonMxfp4Experts(spec, OVERLAP), in_mxfp4(spec, tokens)
    other_x = torch.randn_like(x)
    other = torch.rand(tokens, spec.count, device=GPU).argsort(-1)[:, : spec.top_k].int()
    wanted = kernel(other_x, weights, other.contiguous(), layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(x, weights, experts, layer)
    x.copy_(other_x)
    experts.copy_(other)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [40, 1000])
def test_all_tokens_may_go_to_the_same_experts(tokens):
    spec = SPECS["Qwen3 30B"]
    x, weights, experts, layer = operands(spec, tokens)
    experts[:] = torch.arange(120, 128, device=GPU)
    assert_close(
        TritonExperts(spec, OVERLAP)(x, weights, experts, layer), ReferenceExperts(spec)(x, weights, experts, layer)
    )


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_a_graph_fits_other_routing_than_it_was_captured_with(tokens):
    spec = SPECS["Qwen3 30B"]
    kernel, (x, weights, experts, layer) = TritonExperts(spec, OVERLAP), operands(spec, tokens)
    other_x = torch.randn_like(x)
    other = torch.rand(tokens, spec.count, device=GPU).argsort(-1)[:, : spec.top_k].int()
    wanted = kernel(other_x, weights, other.contiguous(), layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(x, weights, experts, layer)
    x.copy_(other_x)
    experts.copy_(other)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 2, 8, MAX_TOKENS, 64])
def test_each_layer_of_a_graph_reads_the_experts_that_were_chosen_for_it(tokens):
    """Products of down read the choice before the kernel in front is done: not that of another layer, or replay."""
    routing, spec = ROUTING["Qwen3"], SPECS["Qwen3 30B"]
    kernel, (x, _, _, layer) = TritonExperts(spec, OVERLAP), operands(spec, tokens)
    routers = torch.randn(6, spec.hidden_size, routing.num_experts, device=GPU)
    stream = torch.empty(x.shape, dtype=x.dtype, device=GPU)

    def run() -> None:
        stream.copy_(x)
        for router in routers:
            kernel.add(stream, *launch(x.float() @ router, None, routing, OVERLAP), layer, stream)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        found = stream.clone()
        wanted = x.clone()
        for router in routers:
            chosen = launch(x.float() @ router, None, routing, OVERLAP)
            torch.cuda.synchronize()
            wanted = kernel.add(wanted, *chosen, layer, wanted)
            torch.cuda.synchronize()
        assert torch.equal(found, wanted)
