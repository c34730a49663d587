"""Every kernel of aiter's that we may choose, on inputs of our own, held against our reference of the same op.

The same cases run over the fake on a CPU, where they also show every call that our code can make, and over the real
aiter on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from atom_core.batch import HostLengths
from atom_core.cache import SHUFFLED
from atom_core.kernels import kernel_set
from atom_core.kernels.aiter_library import FP8
from atom_core.kernels.attention import ATTENTION
from atom_core.kernels.experts import EXPERTS, ExpertsSpec, ExpertWeights
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_experts import FP8_EXPERTS, Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_gated_activation import FP8_GATED_ACTIVATION, Fp8GatedActivationSpec
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.fp8_rms_norm import FP8_RMS_NORM, Fp8RmsNormSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET
from atom_core.kernels.gated_delta_net.reference import OneByOne, gated_delta_rule, gated_rms_norm, gates
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.mla_attention import AITER_HEADS, MLA_ATTENTION
from atom_core.kernels.mla_attention.reference import ReferenceMlaAttention
from atom_core.kernels.mla_prefill import MLA_PREFILL, plan
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.kernels.mxfp4_experts import MXFP4_EXPERTS, Mxfp4ExpertsSpec, Mxfp4Weights, empty_scales
from atom_core.kernels.mxfp4_linear import MXFP4_LINEAR, Mxfp4LinearSpec
from atom_core.kernels.mxfp4_linear.reference import dequantize
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, QkvCacheSpec
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.kernels.select import Op, Target
from atom_core.types import RoutingConfig
from tests.gated_delta_cases import DeltaCase, Request, check_delta, delta_batch
from tests.kernel_cases import (
    ATTENTION_CASES,
    TOLERANCE,
    AttentionBatch,
    AttentionCase,
    QkvCase,
    attention_batch,
    check_attention,
    check_qkv,
)
from tests.latent_cases import LATENT_CASES, LatentCase, check_absorbed, check_expanded, latent_batch

Case = Callable[[Target, torch.device], None]
CASES: dict[str, Case] = {}
#: Cases of what aiter has on one of its GPUs alone.
ONLY = {"mxfp4_linear": "gfx950", "mxfp4_experts": "gfx950"}
DTYPES = (torch.bfloat16, torch.float16)


def case(function: Case) -> Case:
    """Add a case under its function's name."""
    CASES[function.__name__] = function
    return function


def cases_on(arch: str) -> dict[str, Case]:
    """Those that run on a GPU of ``arch``."""
    return {name: it for name, it in CASES.items() if ONLY.get(name, arch) == arch}


def chosen(op: Op[Any, Any], spec: Hashable, target: Target, name: str = "aiter") -> Any:
    """The kernel of aiter's for a call; it is an error if it cannot run."""
    return kernel_set(target, {op.name: name}).select(op, spec)


def reference(op: Op[Any, Any], spec: Hashable) -> Any:
    """The definition."""
    return kernel_set(Target("cpu", ""), {op.name: "reference"}).select(op, spec)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Numbers that are the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, roundings: float = 1.0) -> None:
    """Within what the dtype rounds, as a share of the largest magnitude; NaN is far."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if not found.numel():
        return
    difference = (found.double() - expected.double()).abs().max().item()
    allowed = roundings * TOLERANCE[found.dtype] * expected.double().abs().max().item()
    assert difference <= allowed, f"differs by {difference:.3g}, allowed {allowed:.3g}"


@case
def rms_norm(target: Target, device: torch.device) -> None:
    """With and without a residual; rows with gaps between them, and none."""
    for dtype in DTYPES:
        for rows, size in ((1, 64), (5, 128), (0, 64)):
            spec = RmsNormSpec(size, dtype)
            kernel, expected = chosen(RMS_NORM, spec, target), reference(RMS_NORM, spec)
            x = random(rows, size + 8, dtype=dtype, device=device)[:, :size]
            residual = random(rows, size, dtype=dtype, device=device, seed=1)
            weight = random(size, dtype=dtype, device=device, seed=2)
            assert_near(kernel(x, weight, 1e-5, None)[0], expected(x, weight, 1e-5, None)[0])
            pairs = zip(kernel(x.clone(), weight, 1e-5, residual), expected(x, weight, 1e-5, residual), strict=True)
            for found, wanted in pairs:
                assert_near(found, wanted)


@case
def gated_activation(target: Target, device: torch.device) -> None:
    """Every activation; large gates, where the clamped one differs."""
    for dtype in DTYPES:
        for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
            spec = GatedActivationSpec(activation, 24, dtype)
            for rows in (0, 1, 7):
                x = 6 * random(rows, 48, dtype=dtype, device=device)
                found = chosen(GATED_ACTIVATION, spec, target)(x)
                assert_near(found, reference(GATED_ACTIVATION, spec)(x.float()).to(dtype))


@case
def linear(target: Target, device: torch.device) -> None:
    """With and without a bias, and with results in float32."""
    for dtype in DTYPES:
        for rows, bias in ((0, None), (1, True), (9, None), (33, True)):
            spec = LinearSpec(48, 32, bool(bias), dtype)
            x, weight = random(rows, 48, dtype=dtype, device=device), random(32, 48, dtype=dtype, device=device, seed=1)
            offset = random(32, dtype=dtype, device=device, seed=2) if bias else None
            kernel = chosen(LINEAR, spec, target)
            assert not kernel.adopt(weight, offset)
            wide = None if offset is None else offset.float()
            expected = torch.nn.functional.linear(x.float(), weight.float(), wide).to(dtype)
            assert_near(kernel(x, weight, offset), expected)
        # Fewer rows with results in float32 are our own kernels'.
        for rows in (0, 17, 70):
            x, weight = random(rows, 48, dtype=dtype, device=device), random(32, 48, dtype=dtype, device=device, seed=1)
            kernel = chosen(LINEAR, LinearSpec(48, 32, False, dtype, float32_result=True), target)
            assert_near(kernel(x, weight, None), x.float() @ weight.float().T)


def assert_rounds_alike(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    """``found`` is as far from the product of unrounded activations as the reference is, but for a fifth of that.

    e4m3fnuz has another largest number than e4m3fn, so scales, and with them single roundings, differ.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    for mine, theirs, true in zip(found.float(), expected.float(), exact.float(), strict=True):
        share = (mine - true).norm() / true.norm().clamp_min(1e-9)
        assert share <= max(1.2 * (theirs - true).norm() / true.norm().clamp_min(1e-9), 0.04), share


def e4m3(*shape: int, device: torch.device) -> torch.Tensor:
    """Weights of every magnitude that e4m3 has but NaN, and minus zeros, which other forms of e4m3 have not."""
    bits = torch.randint(256, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0x80
    return bits.view(torch.float8_e4m3fn).to(device)


@case
def fp8_linear(target: Target, device: torch.device) -> None:
    """Scales of rows, and one for all that cuts some numbers; a row of zeros; weights that are loaded again."""
    for static in (False, True):
        for bias in (False, True):
            spec = Fp8LinearSpec(160, 48, bias, torch.bfloat16, "static" if static else "dynamic")
            kernel = chosen(FP8_LINEAR, spec, target)
            for seed, rows in enumerate((0, 1, 5, 70)):
                weight = e4m3(48, 160, device=device).roll(seed, 0)
                scale = random(48, dtype=torch.float32, device=device).abs() * 1e-3
                x = random(rows, 160, dtype=torch.bfloat16, device=device, seed=1 + seed)
                x[: rows // 5] = 0
                x[rows // 2 :] *= 50
                given = torch.tensor([5 / 448], device=device) if static else None
                offset = random(48, dtype=torch.bfloat16, device=device, seed=2) if bias else None
                expected = reference(FP8_LINEAR, spec)(x, weight, scale, given, offset)
                # Where a static scale cuts, e4m3fnuz, read at twice the scale, has a little more room.
                limit = 5.0 if target.arch == "gfx950" else 5.0 * 480 / 448
                exact = (x.float().clamp(-limit, limit) if static else x.float()) @ (weight.float() * scale[:, None]).T
                exact = exact if offset is None else exact + offset
                kernel.adopt(weight, scale)
                assert_rounds_alike(kernel(x, weight, scale, given, offset), expected, exact)


@case
def fp8_block_linear(target: Target, device: torch.device) -> None:
    """Blocks whose scales differ a lot; a group of zeros; half a block of outputs."""
    for outputs, bias in ((256, False), (256, True), (192, False)):
        spec = Fp8BlockLinearSpec(384, outputs, bias, torch.bfloat16)
        kernel = chosen(FP8_BLOCK_LINEAR, spec, target)
        for rows in (0, 1, 5, 70):
            weight = e4m3(outputs, 384, device=device)
            scale = torch.tensor([[1e-3, 2e-2, 3e-4], [5e-3, 1e-4, 4e-3]], device=device)
            x = random(rows, 384, dtype=torch.bfloat16, device=device, seed=1)
            x[:, 128:256] *= torch.arange(rows, device=device)[:, None]
            offset = random(outputs, dtype=torch.bfloat16, device=device, seed=2) if bias else None
            expected = reference(FP8_BLOCK_LINEAR, spec)(x, weight, scale, offset)
            wide = scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)
            exact = x.float() @ (weight.float() * wide).T
            exact = exact if offset is None else exact + offset
            kernel.adopt(weight, scale)
            assert_rounds_alike(kernel(x, weight, scale, offset), expected, exact)


def quantized_forms(target: Target) -> tuple[InputForm, InputForm]:
    """What the products with scales of rows and of blocks take."""
    return InputForm(FP8[target.arch], None), InputForm(FP8[target.arch], 128)


def assert_quantized(found: QuantizedInput, exact: torch.Tensor, form: InputForm) -> None:
    """Scales are those of the numbers, or as far off as their last bits, and each number is rounded once."""
    limit, subnormal = torch.finfo(form.dtype).max, torch.finfo(form.dtype).smallest_normal / 8
    assert found.values.dtype == form.dtype
    assert found.values.shape == exact.shape
    group = form.group or exact.shape[1]
    grouped = exact.float().view(len(exact), exact.shape[1] // group, group)
    scale = grouped.abs().amax(-1).clamp_min(1e-10) / limit
    torch.testing.assert_close(found.scales, scale if form.group is None else scale.t(), rtol=1e-4, atol=0)
    restored = found.values.float().view(grouped.shape) * scale[..., None]
    allowed = grouped.abs() * (2**-4 + 1e-3) + scale[..., None] * subnormal
    assert bool(((restored - grouped).abs() <= allowed).all())


def check_product_of_quantized(
    target: Target, found: QuantizedInput, x: torch.Tensor, exact: torch.Tensor, form: InputForm
) -> None:
    """The product behind multiplies ``found`` as it does ``x [T, K]``, whose numbers are rounded to 16 bits."""
    size = exact.shape[1]
    weight = e4m3(128, size, device=exact.device)
    for bias in (False, True):
        offset = random(128, dtype=torch.bfloat16, device=exact.device, seed=8) if bias else None
        if form.group is None:
            spec = Fp8LinearSpec(size, 128, bias, torch.bfloat16, "dynamic")
            kernel, theirs = chosen(FP8_LINEAR, spec, target), reference(FP8_LINEAR, spec)
            scale = random(128, dtype=torch.float32, device=exact.device, seed=9).abs() * 1e-3
            expected = theirs(x, weight, scale, None, offset)
            wide = weight.float() * scale[:, None]
        else:
            block = Fp8BlockLinearSpec(size, 128, bias, torch.bfloat16)
            kernel, theirs = chosen(FP8_BLOCK_LINEAR, block, target), reference(FP8_BLOCK_LINEAR, block)
            scale = random(1, size // 128, dtype=torch.float32, device=exact.device, seed=9).exp() * 1e-3
            expected = theirs(x, weight, scale, offset)
            wide = weight.float() * scale.repeat_interleave(128, 1)
        mine = weight.clone()
        kernel.adopt(mine, scale)
        true = exact.float() @ wide.T
        assert_rounds_alike(
            kernel.multiply(found, mine, scale, offset), expected, true if offset is None else true + offset
        )


@case
def fp8_rms_norm(target: Target, device: torch.device) -> None:
    """With and without a residual; rows with gaps between them, and none; numbers that eps counts beside."""
    dtype = torch.bfloat16
    for form in quantized_forms(target):
        # The widest is one of those that aiter's norm by itself has no groups of 128 for.
        for rows, size in ((0, 128), (1, 384), (33, 1536), (5, 5120)):
            kernel = chosen(FP8_RMS_NORM, Fp8RmsNormSpec(size, dtype, form, ()), target)
            x = random(rows, size + 64, dtype=dtype, device=device)[:, :size]
            x[rows // 2 :] *= 0.01
            weight = random(size, dtype=dtype, device=device, seed=1)
            for residual in (None, random(rows, size, dtype=dtype, device=device, seed=2) * 0.01):
                total = x.float() if residual is None else x.float() + residual.float()
                exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
                before = (x.clone(), None if residual is None else residual.clone())
                found, summed = kernel(x, weight, 1e-5, residual)
                assert torch.equal(x, before[0])
                if residual is not None:
                    assert torch.equal(residual, before[1])
                    assert_near(summed, total.to(dtype))
                assert (summed is None) == (residual is None)
                assert_quantized(found, exact, form)
                check_product_of_quantized(target, found, exact.to(dtype), exact, form)


@case
def fp8_gated_activation(target: Target, device: torch.device) -> None:
    """Every activation that there is; widths of the kernel in HIP, and of that in Triton, within a power of two."""
    dtype = torch.bfloat16
    for form in quantized_forms(target):
        for activation, size in (("silu", 384), ("silu", 4224), ("silu", 6272), ("gelu", 128), ("gelu_tanh", 640)):
            kernel = chosen(FP8_GATED_ACTIVATION, Fp8GatedActivationSpec(activation, size, dtype, form, ()), target)
            for rows in (0, 1, 7):
                x = 3 * random(rows, 2 * size, dtype=dtype, device=device)
                x[:, :128] *= torch.arange(rows, device=device)[:, None]
                spec = GatedActivationSpec(activation, size, torch.float32)
                exact = reference(GATED_ACTIVATION, spec)(x.float())
                before, found = x.clone(), kernel(x)
                assert torch.equal(x, before)
                assert_quantized(found, exact, form)
                check_product_of_quantized(target, found, exact.to(dtype), exact, form)


def attention_cases() -> list[AttentionCase]:
    """Every batch of the other attention kernels, and such as single kernels of aiter's take, over pages it has."""
    rows = ((9, 1), (20, 1), (31, 1), (15, 1))
    cases = [
        replace(it, dim=64, page_size=16 if it.page_size == 1 else it.page_size)
        for it in ATTENTION_CASES
        if it.storage == "PHN"
    ]
    cases += [replace(it, dim=128) for it in cases if it.name in ("prefill", "decode", "a window", "soft cap")]
    cases += [
        AttentionCase("8 heads a group, two tokens each", ((12, 2), (16, 2)), heads=16, kv_heads=2, dim=128),
        AttentionCase("8 heads a group, three tokens each", ((12, 3), (16, 3)), heads=16, kv_heads=2, dim=128),
        AttentionCase("17 heads a group", rows, heads=17, kv_heads=1, dim=128),
        AttentionCase("5 heads a group", rows, heads=10, kv_heads=2, dim=128),
        AttentionCase("heads of 32", rows, dim=32),
        AttentionCase("heads of 256", ((9, 1), (0, 6)), dim=256),
        AttentionCase("decode, a window", rows, dim=64, window=6),
        AttentionCase("decode of several tokens, a window", ((12, 3), (40, 3)), dim=64, window=6),
        AttentionCase("decode, sinks", rows, dim=64, sinks=True),
        AttentionCase("decode, padded", rows, dim=128, padded_requests=2),
        AttentionCase("64 tokens a page, decode", rows, dim=128, page_size=64),
    ]
    return [replace(it, keeps_left=True) for it in cases]


def attention_call(case: AttentionCase, target: Target, inputs: AttentionBatch, order: str, cache_dtype: Any) -> Any:
    """The kernel of a case, and the one of aiter's that it takes for it."""
    name = "aiter_shuffled" if order == SHUFFLED else "aiter"
    kernel = chosen(ATTENTION, case.spec(inputs.q.dtype, cache_dtype), target, name)
    return kernel, kernel.chosen(inputs.cache, inputs.batch, len(inputs.q)).kernel


def run_attention(target: Target, device: torch.device, order: str) -> dict[str, int]:
    """All cases in both dtypes, and with an FP8 cache; how often each of aiter's kernels was taken."""
    taken: Counter[str] = Counter()
    for it in attention_cases():
        case = replace(it, storage=order if order == SHUFFLED else it.storage)
        for dtype, cache_dtype in ((torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, FP8[target.arch])):
            inputs = attention_batch(case, dtype, device, cache_dtype=cache_dtype)
            kernel, name = attention_call(case, target, inputs, order, cache_dtype)
            check_attention(kernel, inputs)
            taken[name] += 1
    # Requests that decode, counted, and prompts behind them.
    case = AttentionCase("", ((9, 1), (20, 1), (0, 5), (7, 6)), dim=128, storage=order if order == SHUFFLED else "PNH")
    inputs = attention_batch(case, torch.bfloat16, device)
    kernel, _ = attention_call(case, target, inputs, order, None)
    check_attention(kernel, replace(inputs, batch=replace(inputs.batch, num_decode_requests=2, num_decode_tokens=2)))
    return taken


@case
def attention(target: Target, device: torch.device) -> None:
    """Over plain pages."""
    assert set(run_attention(target, device, "plain")) == {"unified_attention"}


@case
def attention_by_token(target: Target, device: torch.device) -> None:
    """Over plain pages whose tokens' heads lie together, which prompts go through in CK."""
    taken = set()
    for it in attention_cases():
        case = replace(it, storage="PNH", packed=True)
        inputs = attention_batch(case, torch.bfloat16, device)
        kernel, name = attention_call(case, target, inputs, "plain", None)
        check_attention(kernel, inputs)
        taken.add(name)
    assert taken == {"unified_attention", "mha_batch_prefill"}


@case
def attention_over_shuffled_pages(target: Target, device: torch.device) -> None:
    """In the order that the decode kernels read."""
    taken = run_attention(target, device, SHUFFLED)
    assert set(taken) == {"pa_fwd_asm", "pa_decode_gluon", "unified_attention", "mha_batch_prefill"}


@case
def attention_over_large_shuffled_pages(target: Target, device: torch.device) -> None:
    """In FP8, by the kernel that wants its work shared out before; requests of no tokens, and drafts behind some."""
    rows = ((3, 1), (700, 1), (2100, 1), (255, 1), (1023, 1), (256, 1))
    cases = [
        AttentionCase("one token each", rows, heads=8, kv_heads=2, dim=128),
        AttentionCase("a long one alone", ((5000, 1),), heads=16, kv_heads=1, dim=128),
        AttentionCase("three tokens each", ((12, 3), (300, 3), (1022, 3)), heads=32, kv_heads=2, dim=128),
        AttentionCase("padded", rows[:3], heads=8, kv_heads=8, dim=128, padded_requests=2, padded_tokens=2),
    ]
    for it, page_size in ((it, size) for it in cases for size in (256, 1024)):
        case = replace(it, storage=SHUFFLED, page_size=page_size)
        inputs = attention_batch(case, torch.bfloat16, device, cache_dtype=FP8[target.arch])
        kernel, name = attention_call(case, target, inputs, SHUFFLED, FP8[target.arch])
        assert name == "pa_persistent_fwd"
        check_attention(kernel, inputs)


@case
def qk_norm_rope_cache(target: Target, device: torch.device) -> None:
    """Into plain pages and shuffled ones, in 16 bits and in FP8; tokens without a slot."""
    for dim, rotary_dim, interleaved in ((64, 64, False), (128, 64, False), (128, 128, True), (256, 64, False)):
        for order in ("plain", SHUFFLED):
            shape = QkvCase(
                "",
                heads=3,
                kv_heads=1,
                dim=dim,
                rotary_dim=rotary_dim,
                interleaved=interleaved,
                qk_norm=True,
                storage=SHUFFLED if order == SHUFFLED else "PHN",
            )
            for dtype in DTYPES:
                spec = QkvCacheSpec(shape.spec(dtype), dtype, order)
                check_qkv(shape, chosen(QK_NORM_ROPE_CACHE, spec, target), dtype, device)
                if dim > 64:
                    scaled = replace(shape, k_scale=0.5, v_scale=4.0)
                    spec = replace(spec, cache_dtype=FP8[target.arch])
                    kernel = chosen(QK_NORM_ROPE_CACHE, spec, target)
                    check_qkv(scaled, kernel, dtype, device, cache_dtype=FP8[target.arch])


ROUTINGS = (
    RoutingConfig(5, 1, "softmax", renormalize=False),
    RoutingConfig(128, 8, "softmax", renormalize=True),
    RoutingConfig(60, 4, "softmax", renormalize=False),
    RoutingConfig(8, 2, "softmax", renormalize=True, scale=1.5),
    RoutingConfig(128, 8, "sigmoid", renormalize=True, correction=True, scale=2.5),
    RoutingConfig(12, 3, "sigmoid", renormalize=False, scale=2.5),
    RoutingConfig(256, 8, "sigmoid", True, True, 2.5, num_groups=8, top_groups=4),
    RoutingConfig(256, 8, "sigmoid", False, True, 1.0, num_groups=8, top_groups=4),
    RoutingConfig(64, 6, "sigmoid", False, True, 2.5, num_groups=8, top_groups=2),
    RoutingConfig(8, 2, "sigmoid", True, True, 1.5, num_groups=2, top_groups=1),
    RoutingConfig(160, 6, "softmax", False, False, 16.0, num_groups=8, top_groups=3, group_score="largest"),
    RoutingConfig(24, 4, "sigmoid", True, False, 2.0, num_groups=2, top_groups=1, group_score="largest"),
)


@case
def moe_routing(target: Target, device: torch.device) -> None:
    """Every way of scoring, with groups and without; rows with gaps between them, and none."""
    for spec in ROUTINGS:
        kernel, expected = chosen(MOE_ROUTING, spec, target), reference(MOE_ROUTING, spec)
        correction = random(spec.num_experts, dtype=torch.float32, device=device, seed=1) if spec.correction else None
        for rows, dtype in ((0, torch.bfloat16), (1, torch.float32), (9, torch.bfloat16), (33, torch.float32)):
            # No two scores of a row are so near that rounding would decide.
            order = random(rows, spec.num_experts, dtype=torch.float32, device=device).argsort(-1).float()
            logits = torch.zeros(rows, spec.num_experts + 8, dtype=dtype, device=device)[:, : spec.num_experts]
            logits.copy_(order * (6 / spec.num_experts) - 3)
            found, wanted = (by_expert(*it(logits, correction), spec.num_experts) for it in (kernel, expected))
            assert_near(found, wanted)


def by_expert(weights: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    """``[T, E]``: the order of a token's experts does not matter."""
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int32
    return weights.new_zeros(len(weights), count).scatter_add_(1, experts.long(), weights)


def routed(rows: int, total: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and experts of which no token has one twice."""
    scores = random(rows, total, dtype=torch.float32, device=device, seed=4)
    weights, experts = scores.softmax(-1).topk(top_k, -1)
    return weights.contiguous(), experts.int().contiguous()


#: (first, count) of six experts that a rank holds.
SHARES = ((0, 6), (0, 3), (2, 3), (5, 1))


@case
def experts(target: Target, device: torch.device) -> None:
    """All experts, and those of a rank; weights that are loaded again."""
    for dtype in DTYPES:
        for (first, count), hidden, intermediate in zip(SHARES, (128, 256, 128, 128), (64, 256, 192, 128), strict=True):
            spec = ExpertsSpec(first, count, hidden, intermediate, 3, "silu", bias=False, dtype=dtype, total=6)
            kernel, expected = chosen(EXPERTS, spec, target), reference(EXPERTS, spec)
            for seed, rows in enumerate((0, 1, 5, 40)):
                gate_up = random(count, 2 * intermediate, hidden, dtype=dtype, device=device, seed=seed) * hidden**-0.5
                down = (
                    random(count, hidden, intermediate, dtype=dtype, device=device, seed=9 + seed) * intermediate**-0.5
                )
                layer = ExpertWeights(gate_up, down)
                x = random(rows, hidden, dtype=dtype, device=device, seed=2)
                weights, ids = routed(rows, 6, 3, device)
                wide = ExpertWeights(gate_up.float(), down.float())
                wanted = expected(x.float(), weights, ids, wide).to(dtype)
                kernel.adopt(layer)
                found = kernel(x, weights, ids, layer)
                # What comes between the products is rounded too.
                assert_near(found, wanted, roundings=2)


@case
def fp8_experts(target: Target, device: torch.device) -> None:
    """Scales of rows and of blocks, which differ a lot; all experts, and those of a rank; weights loaded again."""
    hidden, intermediate = 256, 256
    for block in (False, True):
        for first, count in SHARES:
            spec = Fp8ExpertsSpec(first, count, hidden, intermediate, 3, "silu", block, torch.bfloat16, 6)
            kernel, expected = chosen(FP8_EXPERTS, spec, target), reference(FP8_EXPERTS, spec)
            for seed, rows in enumerate((0, 1, 5, 40)):
                layer = fp8_layer(count, hidden, intermediate, block, seed, device)
                x = random(rows, hidden, dtype=torch.bfloat16, device=device, seed=2)
                x[:, :128] *= 8
                weights, ids = routed(rows, 6, 3, device)
                wanted = expected(x, weights, ids, layer)
                plain = ExpertsSpec(first, count, hidden, intermediate, 3, "silu", bias=False, dtype=torch.float32)
                wide = ExpertWeights(
                    *(widened(*it) for it in ((layer.gate_up, layer.gate_up_scale), (layer.down, layer.down_scale)))
                )
                exact = reference(EXPERTS, plain)(x.float(), weights, ids, wide)
                kernel.adopt(layer)
                assert_rounds_alike_twice(kernel(x, weights, ids, layer), wanted, exact)


def assert_rounds_alike_twice(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    """As :func:`assert_rounds_alike` of all tokens together: of two products behind each other, a token's is chance.

    e4m3 rounds by up to 1/16, which numbers of one token may each come near.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    mine, theirs, true = found.float(), expected.float(), exact.float()
    size = true.norm().clamp_min(1e-9)
    assert (mine - true).norm() / size <= max(1.2 * (theirs - true).norm() / size, 0.0625)
    assert bool(((mine - true).norm(dim=-1) <= 0.1 * true.norm(dim=-1)).all())


def fp8_layer(
    count: int, hidden: int, intermediate: int, block: bool, seed: int, device: torch.device
) -> Fp8ExpertWeights:
    """Weights whose products are of the size of what goes in."""

    def scales(rows: int, columns: int, salt: int) -> torch.Tensor:
        shape = (count, rows // 128, columns // 128) if block else (count, rows)
        spread = random(*shape, dtype=torch.float32, device=device, seed=seed + salt).exp2()
        return spread * (columns**-0.5 / 128)

    gate_up = e4m3(count, 2 * intermediate, hidden, device=device).roll(seed, 1)
    down = e4m3(count, hidden, intermediate, device=device).roll(seed, 1)
    return Fp8ExpertWeights(gate_up, scales(2 * intermediate, hidden, 5), down, scales(hidden, intermediate, 6))


def widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a weight with its scales, of rows or of blocks of 128, stands for."""
    if scale.dim() == 2:
        return weight.float() * scale[..., None]
    return weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


#: (tokens cached before, new tokens) of each request, and how many tokens all bring.
DECODES: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (
    (1, ((0, 1), (15, 1), (16, 1), (40, 1))),
    (1, ((700, 1), (0, 1), (1100, 1))),
    (2, ((12, 2), (0, 2), (530, 2))),
    (3, ((12, 3), (16, 3), (30, 3))),
    (4, ((0, 4), (61, 4), (700, 4))),
)


@case
def mla_attention(target: Target, device: torch.device) -> None:
    """One token of each request, and several; all numbers of heads, pages and caches; and beside other requests."""

    def check(shape: LatentCase, cache_dtype: Any = None, decodes: int = 0, **options: Any) -> None:
        inputs = latent_batch(shape, torch.bfloat16, device, cache_dtype=cache_dtype)
        spec = shape.spec(torch.bfloat16, cache_dtype)
        kernel = chosen(MLA_ATTENTION, spec, target)
        counted = replace(inputs.batch, num_decode_requests=decodes, num_decode_tokens=decodes)
        inputs = replace(inputs, batch=counted)
        if device.type == "cpu":
            # Batches that aiter decodes are never Triton's.
            kernel.others = ReferenceMlaAttention(spec) if decodes else None
        check_absorbed(shape, kernel, inputs, **options)

    sizes = {"rank": 512, "rope_dim": 64}
    for heads, most in AITER_HEADS[target.arch].items():
        for each, requests in DECODES:
            if each > most or (heads > 16 and requests[-1][0] > 600):
                continue
            for page_size in (16, 64, 1) if heads == 16 else (16,):
                shape = LatentCase("", requests, heads=heads, page_size=page_size, **sizes)
                check(shape)
                if heads == 16:
                    check(shape, FP8[target.arch])
    check(LatentCase("", DECODES[-1][1], heads=8, **sizes))
    padded = LatentCase("", ((30, 2), (5, 2)), heads=16, padded_requests=2, padded_tokens=4, **sizes)
    check(padded, fills_padding=True)
    mixed = LatentCase("", ((30, 1), (0, 1), (7, 5), (300, 2)), heads=16, **sizes)
    check(mixed, decodes=2)


def mxfp4(*shape: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[.., K]`` of every number, in groups of very different sizes; its products are as large as its inputs.

    The blocks, and the scales as a layer of experts keeps them.
    """
    *rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*rows, columns // 2), generator=generator, dtype=torch.uint8)
    # Powers of two from 1 to 64 below what makes a row's numbers' squares sum up to less than one.
    scales = torch.randint(7, (*rows, columns // 32), generator=generator, dtype=torch.uint8)
    scales += 127 - 6 - columns.bit_length() // 2
    count = rows[0] if len(rows) > 1 else 1
    kept = empty_scales(count, rows[-1], columns).copy_(scales.view(count, rows[-1], -1))
    return blocks.to(device), kept.to(device) if len(rows) > 1 else kept[0].contiguous().to(device)


@case
def mxfp4_linear(target: Target, device: torch.device) -> None:
    """Outputs that fill no tile; groups of zeros, and of very different sizes; weights that are loaded again."""
    for inputs, outputs, bias in ((256, 32, False), (512, 288, True)):
        spec = Mxfp4LinearSpec(inputs, outputs, bias, rounded_inputs=True, dtype=torch.bfloat16)
        kernel, expected = chosen(MXFP4_LINEAR, spec, target), reference(MXFP4_LINEAR, spec)
        for seed, rows in enumerate((0, 1, 5, 70, 300)):
            blocks, scales = mxfp4(outputs, inputs, seed=seed, device=device)
            x = random(rows, inputs, dtype=torch.bfloat16, device=device, seed=1 + seed)
            x[:, :64] *= torch.tensor([0.0, 30.0], device=device).repeat_interleave(32)
            offset = random(outputs, dtype=torch.bfloat16, device=device, seed=2) if bias else None
            wanted = expected(x, blocks, scales, offset)
            kernel.adopt(blocks, scales)
            assert_near(kernel(x, blocks, scales, offset), wanted, roundings=2)


@case
def mxfp4_experts(target: Target, device: torch.device) -> None:
    """Experts whose scales differ a lot; more rows than fill a tile; weights that are loaded again.

    A group may have either of two scales, and the intermediate result may be rounded either way before. So outputs only
    have to be as close to those of unrounded activations as the reference's.
    """
    hidden, intermediate = 512, 256
    spec = Mxfp4ExpertsSpec(0, 6, hidden, intermediate, 3, "silu", False, torch.bfloat16, 6, rounded_inputs=True)
    kernel, expected = chosen(MXFP4_EXPERTS, spec, target), reference(MXFP4_EXPERTS, spec)
    for seed, rows in enumerate((0, 1, 5, 40)):
        gate_up = mxfp4(6, 2 * intermediate, hidden, seed=seed, device=device)
        down = mxfp4(6, hidden, intermediate, seed=9 + seed, device=device)
        layer = Mxfp4Weights(*gate_up, *down)
        x = random(rows, hidden, dtype=torch.bfloat16, device=device, seed=2)
        x[:, :64] *= torch.tensor([0.0, 3.0], device=device).repeat_interleave(32)
        weights, ids = routed(rows, 6, 3, device)
        wanted = expected(x, weights, ids, layer).float()
        wide = ExpertWeights(dequantize(*gate_up, torch.float32), dequantize(*down, torch.float32))
        plain = ExpertsSpec(0, 6, hidden, intermediate, 3, "silu", bias=False, dtype=torch.float32)
        exact = reference(EXPERTS, plain)(x.float(), weights, ids, wide)
        kernel.adopt(layer)
        found = kernel(x, weights, ids, layer)
        assert found.dtype == x.dtype
        assert found.shape == x.shape
        allowed = 1.2 * (wanted - exact).norm()
        assert (found.float() - exact).norm() <= allowed, (found.float() - exact).norm() / allowed


PROMPTS = (Request(70), Request(9, False), Request(2, False), Request(1, False), Request(65), Request(2))
#: (case, whether aiter runs what of it is a prompt).
DELTA_CASES = (
    (DeltaCase("prompts", PROMPTS), True),
    (DeltaCase("padding", PROMPTS, padded_requests=3, padded_tokens=70), True),
    (DeltaCase("channels first", PROMPTS[:3], key_heads=2, value_heads=2, channels_first=True), True),
    (DeltaCase("a convolution of two", (Request(9), Request(1)), conv_width=2), True),
    (DeltaCase("a convolution of three", (Request(9), Request(1), Request(2, False)), conv_width=3), True),
    (DeltaCase("decodes in front", (Request(1), Request(1), *PROMPTS), decodes=2, padded_requests=1), True),
    (DeltaCase("decodes and padding", (Request(1), Request(1)), decodes=2, padded_requests=2), False),
    (DeltaCase("decodes alone", (Request(1), Request(1)), decodes=2), False),
    (DeltaCase("drafts", (Request(9, accepted=2),), columns=3, drafts=True), False),
    (DeltaCase("copies", (Request(9, snapshot=4),), snapshots=True), False),
)


@case
def gated_delta_net(target: Target, device: torch.device) -> None:
    """Prompts, with a state and without, of fewer tokens than the convolution has; what aiter leaves to Triton."""
    sizes = {"key_heads": 2, "value_heads": 6, "key_dim": 128, "value_dim": 128}
    for (it, runs), state_dtype in ((it, dtype) for it in DELTA_CASES for dtype in (torch.float32, torch.bfloat16)):
        shape = replace(it, **(sizes if it.key_heads != it.value_heads else sizes | {"value_heads": 2}))
        inputs = delta_batch(shape, torch.bfloat16, device, state_dtype)
        if state_dtype == torch.float32:  # otherwise the host does not know how many tokens each has
            host = HostLengths(inputs.batch.query_start_loc.tolist(), inputs.batch.seq_lens.tolist())
            inputs = replace(inputs, batch=replace(inputs.batch, host=host))
        kernel = chosen(GATED_DELTA_NET, shape.spec(torch.bfloat16, state_dtype), target)
        if device.type == "cpu":
            kernel.others = OneByOne(gated_delta_rule)
        with without_triton(device):
            check_delta(kernel, inputs, times=2)
        found = inputs.batch.scratch.get("aiter gated_delta_net")
        assert runs == (found is not None), shape.name
        assert not runs or sum(found.lengths) == sum(request.tokens for request in shape.requests[shape.decodes :])


def without_triton(device: torch.device) -> Any:
    """On a CPU, the reference in place of what we have in Triton around aiter's kernels."""
    if device.type != "cpu":
        return nullcontext()

    def compute_gates(ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> Any:
        b, a = ba.chunk(2, -1)
        return gates(a, b, a_log, dt_bias)

    def norm_and_gate(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        out.copy_(gated_rms_norm(x, z.unflatten(-1, x.shape[1:]), weight, eps))

    return mock.patch.multiple(
        "atom_core.kernels.gated_delta_net.aiter_kernel", compute_gates=compute_gates, norm_and_gate=norm_and_gate
    )


@case
def mla_prefill(target: Target, device: torch.device) -> None:
    """All requests expanded, with all keys at a time, and so few that requests go on from chunk to chunk."""
    of_all = mock.patch.object(plan, "expanding_is_cheaper", lambda new, *_: new > 0)
    for most in (1024, 24):
        some = mock.patch.multiple(plan, BUFFER_BYTES=0, MIN_KEYS=most)
        for it in LATENT_CASES:
            if it.rank != 32 or it.nope_dim != 16 or it.heads > 20:
                continue  # other sizes than these kernels have
            shape = replace(it, nope_dim=128, rope_dim=64, value_dim=128, heads=min(it.heads, 3))
            for cache_dtype in (None, FP8[target.arch]):
                inputs = latent_batch(shape, torch.bfloat16, device, cache_dtype=cache_dtype)
                kernel = chosen(MLA_PREFILL, shape.spec(torch.bfloat16, cache_dtype), target)
                with of_all, some:
                    check_expanded(shape, kernel, inputs, ulps=2)
