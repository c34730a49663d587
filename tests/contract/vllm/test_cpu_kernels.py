"""vLLM's CPU kernels compute our ops: what we contribute from them answers as the reference does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm import _custom_ops as ops

from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.kernels.linear import LinearSpec, widened
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.kernels.qk_norm_rope.reference import qk_norm_rope
from atom_core.kernels.rms_norm import RmsNormSpec
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target
from atom_plugin.vllm import cpu_kernels
from tests.kernel_cases import AttentionCase, QkvCase, assert_close, attention_batch, check_attention

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

CPU = torch.device("cpu")
PAGE = 32
BATCH = ((40, 1), (0, 9), (31, 1), (32, 5), (0, 1))
LAYERS = (
    {"heads": 4, "kv_heads": 2, "dim": 64},
    {"heads": 4, "kv_heads": 4, "dim": 128},
    {"heads": 8, "kv_heads": 1, "dim": 32},
    {"heads": 4, "kv_heads": 2, "dim": 64, "window": 7},
    {"heads": 4, "kv_heads": 2, "dim": 64, "soft_cap": 2.0},
    {"heads": 4, "kv_heads": 2, "dim": 64, "sinks": True},
)

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def reason_against(spec, block_size=PAGE):
    """Why the attention kernel cannot run; None if it can."""
    return cpu_kernels._attention_supports(spec, Target("cpu", ""), block_size=block_size)


@every_dtype
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_attention_over_pages_in_its_own_order(layer, dtype):
    case = AttentionCase("", BATCH, page_size=PAGE, **layer)
    spec = case.spec(dtype)
    assert reason_against(spec) is None
    inputs = attention_batch(case, dtype, CPU)
    if inputs.sinks is not None:
        inputs = replace(inputs, sinks=inputs.sinks.bfloat16())  # vLLM 0.30 takes no other dtype
    kernel = cpu_kernels.CpuAttention(spec, PAGE)
    shape = (inputs.cache.key.shape[0], case.kv_heads, PAGE, 2 * case.dim)
    cache = cpu_kernels.view_pages(torch.zeros(shape, dtype=dtype), case.dim)
    for request, length in enumerate(inputs.batch.seq_lens.tolist()):
        positions = torch.arange(length)
        pages = inputs.batch.pages.table[request, positions // PAGE].long()
        keys, values = (side[pages, :, positions % PAGE] for side in (inputs.cache.key, inputs.cache.value))
        ops.cpu_attn_reshape_and_cache(
            keys, values, cache.key, cache.value, pages * PAGE + positions % PAGE, kernel.isa
        )
    batch = inputs.batch.with_plans({kernel.plan_key(): kernel.plan(inputs.batch)})
    check_attention(kernel, replace(inputs, cache=cache, batch=batch))


@pytest.mark.parametrize(
    ("change", "block_size", "reason"),
    [
        ({"dim": 20}, PAGE, "head sizes"),
        ({}, 16, "pages of a multiple of 32 tokens, not 16"),
    ],
    ids=str,
)
def test_what_its_attention_cannot_do_is_said(change, block_size, reason):
    spec = AttentionCase("", BATCH, **{"dim": 64, **change}).spec(torch.bfloat16)
    assert reason in reason_against(spec, block_size)


@every_dtype
@pytest.mark.parametrize(
    "case",
    [
        QkvCase("neox", dim=64, rotary_dim=64),
        QkvCase("interleaved", dim=64, rotary_dim=64, interleaved=True),
        QkvCase("q/k norm", dim=128, rotary_dim=128, qk_norm=True),
        QkvCase("half of a head rotated", dim=64, rotary_dim=32),
    ],
    ids=str,
)
def test_queries_are_normed_and_rotated(case, dtype):
    torch.manual_seed(0)
    spec = case.spec(dtype)
    qkv = torch.randn(case.tokens, (case.heads + 2 * case.kv_heads) * case.dim).to(dtype)
    positions = torch.randint(50, (case.tokens,))
    angles = torch.rand(50, case.rotary_dim // 2) * 6.28
    # vLLM's table is in the model's dtype, so the one that both read is too.
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).float()
    norms = [torch.rand(case.dim).to(dtype) + 0.5 for _ in range(2)] if case.qk_norm else []
    weights = QkvWeights(table, *norms, eps=1e-6)
    wide = QkvWeights(table, *(norm.float() for norm in norms), eps=1e-6)
    expected, _, _ = qk_norm_rope(qkv.float(), positions, wide, spec=replace(spec, dtype=torch.float32))
    cache = cpu_kernels.view_pages(torch.zeros(4, case.kv_heads, PAGE, 2 * case.dim, dtype=dtype), case.dim)
    fill = cpu_kernels.FillCpuCache(spec, PAGE, cpu_kernels.RopeTables())
    assert_close(fill(qkv, positions, weights, cache, torch.arange(case.tokens)), expected.double())


@every_dtype
def test_norm_alone_and_with_a_residual(dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 64), (5, 64), (64,)))
    assert cpu_kernels._norm_supports(RmsNormSpec(64, dtype), Target("cpu", "")) is None
    for given in (None, residual):
        expected, total = rms_norm(x, weight, 1e-5, given)
        found, summed = cpu_kernels._rms_norm(x.clone(), weight, 1e-5, None if given is None else given.clone())
        # Where the processor has no instruction for it, vLLM cuts numbers off to bfloat16 and does not round them.
        cut = dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported()
        assert_close(found, expected.double(), ulps=2 if cut else 1)
        if given is not None:
            assert_close(summed, total.double(), ulps=2 if cut else 1)
            assert cut or torch.equal(summed, total)
        else:
            assert summed is None


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_needs_the_layers_weight_no_more(bias, dtype):
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(96, 64).to(dtype)
    offset = torch.randn(96).to(dtype) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    kernel = cpu_kernels.DispatchedLinear()
    freed = kernel.adopt(weight, offset)
    given = torch.empty(0, dtype=dtype) if freed else weight
    assert_close(kernel(x, given, offset), expected)
    if bias:  # as a row-parallel layer does on all ranks but the first
        assert_close(kernel(x, given, None), x.double() @ weight.double().T)


def test_a_weight_that_the_embedding_reads_too_is_not_packed():
    spec = LinearSpec(64, 96, False, torch.bfloat16, shares_weight=True)
    assert "store it twice" in cpu_kernels._linear_supports(spec, Target("cpu", ""))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_products_in_16_bits_without_avx_512_are_left_to_torch_by_vllm_and_not_by_us(monkeypatch, wide, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: wide)
    monkeypatch.setattr(widened, "multiplies", lambda dtype: wide)
    found = cpu_kernels._linear_supports(LinearSpec(64, 96, False, dtype), Target("cpu", "x86_64"))
    assert found is None if wide or dtype == torch.float32 else "Without AVX-512" in found


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="no bfloat16 dot products on this processor")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70, 300])
def test_a_product_over_blocks(rows, bias):
    x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    offset = torch.randn(96).bfloat16() if bias else None
    kernel = cpu_kernels.BlockedLinear()
    assert kernel.adopt(weight, offset)
    given = torch.empty(0, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert_close(kernel(x, given, offset), expected)
    assert_close(kernel(x, given, None), x.double() @ weight.double().T)


EXPERTS = ExpertsSpec(0, 8, 64, 96, 2, "silu", False, torch.bfloat16)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="no bfloat16 dot products on this processor")
@pytest.mark.parametrize("tokens", [0, 1, 5, 40, 300])
def test_experts_over_blocks(tokens):
    x = torch.randn(tokens, 64).bfloat16()
    weights, experts = torch.rand(tokens, 2), torch.rand(tokens, 8).argsort(-1)[:, :2].int()
    layer = ExpertWeights(torch.randn(8, 192, 64).mul_(0.1).bfloat16(), torch.randn(8, 64, 96).mul_(0.1).bfloat16())
    exact = ExpertWeights(layer.gate_up.float(), layer.down.float())
    expected = ReferenceExperts(replace(EXPERTS, dtype=torch.float32))(x.float(), weights, experts, exact)
    kernel = cpu_kernels.FusedExperts()
    assert kernel.adopt(layer), "the layer's weights are needed no more"
    found = kernel(x, weights, experts, ExpertWeights(torch.empty(0), torch.empty(0)))
    assert found.shape == x.shape
    if tokens:
        assert_close(found, expected.double())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"total": 8}, None),
        ({"total": 16}, "all experts of a layer, not 8 of 16"),
        ({"dtype": torch.float32}, "in bfloat16, not in torch.float32"),
        ({"bias": True}, "without biases"),
        ({"activation": "gelu"}, "with silu"),
        ({"intermediate_size": 80}, "multiples of 32, not 64 and 80"),
    ],
)
def test_which_experts_are_taken_over_blocks(changes, reason, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    found = cpu_kernels._experts_supports(replace(EXPERTS, **changes), Target("cpu", ""))
    assert found is None if reason is None else reason in found
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert cpu_kernels._experts_supports(EXPERTS, Target("cpu", "")) is not None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (LinearSpec(2048, 96, False, torch.bfloat16), True),
        (LinearSpec(1024, 96, False, torch.bfloat16), False),
        (LinearSpec(1024, 96, False, torch.bfloat16, few_rows=True), True),
        (LinearSpec(2048, 100, False, torch.bfloat16), False),
        (LinearSpec(2050, 96, False, torch.bfloat16), False),
        (LinearSpec(2048, 96, False, torch.float32), False),
    ],
)
def test_blocks_are_for_long_rows_and_heads_in_bfloat16(spec, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert cpu_kernels._blocks_pay(spec) is expected
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not cpu_kernels._blocks_pay(spec)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's build for AVX2 packs no weights")
@pytest.mark.parametrize("kind", [cpu_kernels.BlockedLinear, cpu_kernels.DispatchedLinear])
@pytest.mark.parametrize("shape", [(64, 96), (96, 2048), (352, 320)], ids=str)
def test_a_packed_weight_comes_back_as_it_was_loaded(kind, shape):
    weight, kernel = torch.randn(shape).bfloat16(), kind()
    assert kernel.adopt(weight.clone(), None)
    assert torch.equal(kernel.unpacked(), weight)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's build for AVX2 packs no weights")
def test_packed_experts_come_back_as_they_were_loaded():
    gate_up, down = torch.randn(3, 128, 96).bfloat16(), torch.randn(3, 96, 64).bfloat16()
    kernel = cpu_kernels.FusedExperts()
    assert kernel.adopt(ExpertWeights(gate_up.clone(), down.clone(), None, None))
    for found, expected in zip(kernel.unpacked(), (gate_up, down), strict=True):
        assert torch.equal(found, expected)
