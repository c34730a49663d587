"""Kernels of aiter's, over the fake: what our code makes of them is what our references say."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest
import torch

from atom_core.batch import BatchShape
from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels import OPS, kernel_set
from atom_core.kernels.aiter_library import aiter_function, why_no_aiter
from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.attention.aiter_choice import Call, choose, gluon_window, inclusive_window
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.experts import EXPERTS, ExpertsSpec
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_experts import FP8_EXPERTS, Fp8ExpertsSpec
from atom_core.kernels.fp8_gated_activation import FP8_GATED_ACTIVATION, Fp8GatedActivationSpec
from atom_core.kernels.fp8_gated_activation.aiter_kernel import in_hip
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInputKernel, as_quantized_input_kernel
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.fp8_rms_norm import FP8_RMS_NORM, Fp8RmsNormSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.reference import OneByOne, gated_delta_rule
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.mla_attention import MLA_ATTENTION, MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaSpec
from atom_core.kernels.mla_prefill import MLA_PREFILL
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.kernels.mxfp4_experts import MXFP4_EXPERTS, Mxfp4ExpertsSpec, Mxfp4Weights
from atom_core.kernels.mxfp4_experts.reference import ReferenceMxfp4Experts
from atom_core.kernels.mxfp4_linear import MXFP4_LINEAR, Mxfp4LinearSpec
from atom_core.kernels.mxfp4_linear.aiter_kernel import EVEN
from atom_core.kernels.mxfp4_linear.reference import group_scales, round_groups
from atom_core.kernels.qk_norm_rope import QkvSpec
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, QkvCacheSpec
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.kernels.select import Target
from atom_core.types import RoutingConfig
from tests.aiter_cases import assert_near, cases_on, mxfp4, random, routed, without_triton
from tests.aiter_fake import ARCHITECTURES, calls, fake_aiter
from tests.gated_delta_cases import DeltaCase, Request, check_delta, delta_batch

CPU = torch.device("cpu")
ATTENTION_SPEC = {
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 128,
    "scale": 128**-0.5,
    "dtype": torch.bfloat16,
    "cache_dtype": torch.bfloat16,
}
NORM = RmsNormSpec(64, torch.bfloat16)
EXPERTS_SPEC = ExpertsSpec(0, 4, 256, 256, 2, "silu", bias=False, dtype=torch.bfloat16)
FP8_EXPERTS_SPEC = Fp8ExpertsSpec(0, 4, 256, 256, 2, "silu", block=False, dtype=torch.bfloat16)
GROUPS = InputForm(torch.float8_e4m3fnuz, 128)
FP8_NORM_SPEC = Fp8RmsNormSpec(256, torch.bfloat16, GROUPS, (("rms_norm", "aiter"),))
FP8_ACTIVATION_SPEC = Fp8GatedActivationSpec("silu", 256, torch.bfloat16, GROUPS, (("gated_activation", "aiter"),))
FP8 = torch.float8_e4m3fnuz  # of gfx942
MXFP4_SPEC = Mxfp4LinearSpec(256, 64, bias=True, rounded_inputs=True, dtype=torch.bfloat16)
MXFP4_EXPERTS_SPEC = Mxfp4ExpertsSpec(
    0, 4, 256, 256, 2, "silu", bias=False, dtype=torch.bfloat16, total=4, rounded_inputs=True
)
LATENTS = MlaSpec(4, 512, 128, 64, 128, True, torch.bfloat16, torch.bfloat16)


DELTA_SPEC = GatedDeltaNetSpec(16, 32, 128, 128, 4, torch.bfloat16, torch.float32)


def latents(**changes):
    return MlaAttentionSpec(replace(LATENTS, **changes), 192**-0.5)


every_gpu = pytest.mark.parametrize("arch", ARCHITECTURES)


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for arch in ARCHITECTURES for name in cases_on(arch)])
def test_it_is_the_reference(name, arch):
    with fake_aiter(arch):
        cases_on(arch)[name](Target("rocm", arch), CPU)


@every_gpu
def test_without_aiter_its_gpus_are_refused_with_both_ways_out(arch):
    with pytest.raises(ValueError, match=r"aiter, which our models use on gfx.*github.com/ROCm/aiter.*ATOM_AITER=0"):
        kernel_set(Target("rocm", arch))
    kernels = kernel_set(Target("rocm", arch), with_aiter=False)
    kernels.select(RMS_NORM, NORM)
    (choice,) = kernels.choices()
    assert (choice.implementation, choice.passed_over) == ("triton", (("aiter", "ATOM_AITER=0."),))


@pytest.mark.parametrize("target", [Target("cpu", "x86_64"), Target("cuda", "sm90"), Target("rocm", "gfx90a")], ids=str)
def test_other_devices_do_not_miss_it(target):
    kernel_set(target).select(RMS_NORM, NORM)
    assert why_no_aiter(target) is not None


def test_it_comes_first_and_is_not_imported_for_the_choice():
    import sys

    with fake_aiter("gfx942"):
        for name in [name for name in sys.modules if name.startswith("aiter")]:
            del sys.modules[name]
        kernels = kernel_set(Target("rocm", "gfx942"))
        assert kernels.chosen(RMS_NORM, NORM) == "aiter"
        assert "aiter" not in sys.modules
        kernels.select(RMS_NORM, NORM)
        assert "aiter" in sys.modules


def test_switched_off_it_can_still_be_named_for_single_ops():
    with fake_aiter("gfx942"):
        kernels = kernel_set(Target("rocm", "gfx942"), {"rms_norm": "aiter"}, with_aiter=False)
        assert kernels.chosen(RMS_NORM, NORM) == "aiter"
        assert kernels.chosen(LINEAR, LinearSpec(64, 64, False, torch.bfloat16)) == "triton"


def test_a_function_that_an_older_aiter_lacks_is_an_error_when_the_model_is_built():
    with fake_aiter("gfx942") as fake:
        del fake.rms_norm
        message = "The installed aiter has no aiter.rms_norm, which a kernel that was chosen for this model calls."
        with pytest.raises(ValueError, match=re.escape(message)):
            kernel_set(Target("rocm", "gfx942")).select(RMS_NORM, NORM)
        with pytest.raises(ValueError, match=r"no aiter\.gone\.function"):
            aiter_function("aiter.gone.function")


def test_what_aiter_itself_lacks_is_not_taken_for_a_missing_function(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("import what_aiter_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_aiter_needs"):
        aiter_function("aiter.rms_norm")


@pytest.mark.parametrize(
    ("op", "spec", "reason"),
    [
        (RMS_NORM, RmsNormSpec(64, torch.float32), "bfloat16 and float16, not for torch.float32"),
        (RMS_NORM, RmsNormSpec(8200, torch.bfloat16), "rows of up to 8192 elements"),
        (LINEAR, LinearSpec(8, 8, False, torch.float32), "numbers of two bytes, not for torch.float32"),
        (FP8_LINEAR, Fp8LinearSpec(64, 64, False, torch.float16, "dynamic"), "not of torch.float16"),
        (FP8_LINEAR, Fp8LinearSpec(48, 64, False, torch.bfloat16, "dynamic"), "multiples of 16, not 48 and 64"),
        (FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(128, 96, False, torch.bfloat16), "multiples of 64, not 128 and 96"),
        (FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(128, 128, False, torch.float32), "not of torch.float32"),
        (ATTENTION, ATTENTION_SPEC | {"head_dim": 512}, "head sizes up to 256, not 512"),
        (ATTENTION, ATTENTION_SPEC | {"dtype": torch.float32, "cache_dtype": torch.float32}, "not torch.float32"),
        (ATTENTION, ATTENTION_SPEC | {"cache_dtype": torch.float8_e4m3fn}, "torch.float8_e4m3fnuz, not torch.float8_"),
        (GATED_ACTIVATION, GatedActivationSpec("silu", 8, torch.float32), "not for torch.float32"),
        (GATED_ACTIVATION, GatedActivationSpec("silu", 12, torch.bfloat16), "multiples of 8, not 12"),
        (FP8_RMS_NORM, replace(FP8_NORM_SPEC, dtype=torch.float32), "not for torch.float32"),
        (FP8_RMS_NORM, replace(FP8_NORM_SPEC, size=8320), "up to 8192 numbers, not of 8320"),
        (FP8_RMS_NORM, replace(FP8_NORM_SPEC, size=192), "whole groups of 128 numbers, not rows of 192"),
        (FP8_RMS_NORM, replace(FP8_NORM_SPEC, separate=(("rms_norm", "triton"),)), "and rms_norm is triton here"),
        (FP8_GATED_ACTIVATION, replace(FP8_ACTIVATION_SPEC, dtype=torch.float32), "not for torch.float32"),
        (FP8_GATED_ACTIVATION, replace(FP8_ACTIVATION_SPEC, activation="clamped_swiglu"), "the clamped SwiGLU"),
        (FP8_GATED_ACTIVATION, replace(FP8_ACTIVATION_SPEC, size=192), "multiples of 128, not 192"),
        (FP8_GATED_ACTIVATION, replace(FP8_ACTIVATION_SPEC, size=32896), "up to 32768 numbers, not of 32896"),
        (
            FP8_GATED_ACTIVATION,
            replace(FP8_ACTIVATION_SPEC, separate=(("gated_activation", "triton"),)),
            "and gated_activation is triton here",
        ),
        (EXPERTS, replace(EXPERTS_SPEC, dtype=torch.float32), "numbers of two bytes, not for torch.float32"),
        (EXPERTS, replace(EXPERTS_SPEC, bias=True), "add biases in MXFP4 alone"),
        (EXPERTS, replace(EXPERTS_SPEC, activation="gelu"), "with silu, not with gelu"),
        (EXPERTS, replace(EXPERTS_SPEC, hidden_size=192), "not for 192 with 256"),
        (EXPERTS, replace(EXPERTS_SPEC, intermediate_size=320), "not for 256 with 320"),
        (FP8_EXPERTS, replace(FP8_EXPERTS_SPEC, dtype=torch.float16), "not of torch.float16"),
        (FP8_EXPERTS, replace(FP8_EXPERTS_SPEC, activation="gelu"), "with silu, not with gelu"),
        (FP8_EXPERTS, replace(FP8_EXPERTS_SPEC, intermediate_size=192), "scales of rows are, on gfx942, for hidden"),
        (FP8_EXPERTS, replace(FP8_EXPERTS_SPEC, block=True, hidden_size=384), "not for 384 and 256"),
        (MLA_ATTENTION, latents(num_heads=16, dtype=torch.float16), "for bfloat16, not for torch.float16"),
        (MLA_ATTENTION, latents(num_heads=16, rank=256), "rope dimension 64, not for 256 and 64"),
        (MLA_ATTENTION, latents(num_heads=16, rope_dim=32), "rope dimension 64, not for 512 and 32"),
        (MLA_ATTENTION, latents(num_heads=20), "up to 16 heads on each rank, or 64, or 128, not with 20"),
        (MLA_ATTENTION, latents(num_heads=128, cache_dtype=FP8), "with up to 16 heads on each rank, not with 128"),
        (MLA_ATTENTION, latents(num_heads=16, cache_dtype=torch.float8_e4m3fn), "torch.float8_e4m3fnuz, not torch."),
        (MLA_PREFILL, latents(dtype=torch.float16), "for bfloat16, not for torch.float16"),
        (MLA_PREFILL, latents(value_dim=64), "value size 128, not for 192 and 64"),
        (MOE_ROUTING, RoutingConfig(128, 65, "softmax", True), "up to 64 experts, not 65"),
        (MOE_ROUTING, RoutingConfig(60, 6, "softmax", True, False, 1.0, 6, 3, "largest"), "not 6 groups of 10"),
        (MOE_ROUTING, RoutingConfig(8, 2, "sigmoid", True, True, 1.5, 4, 2), "not 4 groups of 2"),
        (MOE_ROUTING, RoutingConfig(64, 2, "sigmoid", True, True, 1.5, 4, 2), "where there are 8 groups"),
        (
            MOE_ROUTING,
            RoutingConfig(64, 2, "sigmoid", True, True, 1.5, 8, 2, "largest"),
            "corrects no scores of groups",
        ),
        (MOE_ROUTING, RoutingConfig(64, 2, "sigmoid", True, False, 1.5, 8, 2), "sigmoids that are corrected"),
        (MOE_ROUTING, RoutingConfig(256, 8, "sigmoid", False, True, 2.5, 8, 4), "only where it renormalises"),
    ],
)
def test_its_limits_are_said_in_words(op, spec, reason):
    spec = PagedAttentionSpec(**spec) if isinstance(spec, dict) else spec
    with fake_aiter("gfx942"):
        kernels = kernel_set(Target("rocm", "gfx942"))
        kernels.chosen(op, spec)
        said = dict(kernels.choices()[0].passed_over)["aiter"]
    assert reason in said


@pytest.mark.parametrize(
    ("activation", "size", "group", "hip"),
    [
        ("silu", 4096, 128, True),
        ("silu", 4224, 128, False),
        ("silu", 6144, 128, False),
        ("silu", 6272, 128, True),
        ("silu", 8192, 128, True),
        ("silu", 8320, 128, False),
        ("silu", 4096, None, False),
        ("gelu", 4096, 128, False),
    ],
)
def test_widths_that_threads_do_not_share_out_are_activated_in_triton(activation, size, group, hip):
    assert in_hip(activation, size, InputForm(torch.float8_e4m3fn, group)) == hip


def test_products_say_what_they_take_quantised():
    with fake_aiter("gfx942"):
        kernels = kernel_set(Target("rocm", "gfx942"))
        of_rows = {
            inputs: kernels.select(FP8_LINEAR, Fp8LinearSpec(128, 64, False, torch.bfloat16, inputs))
            for inputs in ("dynamic", "static")
        }
        of_blocks = kernels.select(FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(128, 128, False, torch.bfloat16))
        plain = kernels.select(LINEAR, LinearSpec(128, 128, False, torch.bfloat16))
    assert all(isinstance(it, QuantizedInputKernel) for it in (*of_rows.values(), of_blocks))
    assert of_rows["dynamic"].form == InputForm(torch.float8_e4m3fnuz, None)
    assert of_blocks.form == GROUPS
    assert all(it.takes_quantized(1) for it in (of_rows["dynamic"], of_blocks))
    assert as_quantized_input_kernel(of_blocks) is of_blocks
    assert as_quantized_input_kernel(of_rows["static"]) is None
    assert as_quantized_input_kernel(plain) is None


def test_intermediate_sizes_of_384_are_for_gfx942_alone_where_rows_have_scales():
    spec = replace(FP8_EXPERTS_SPEC, intermediate_size=384)
    for arch, name in (("gfx942", "aiter"), ("gfx950", "triton")):
        with fake_aiter(arch):
            assert kernel_set(Target("rocm", arch)).chosen(FP8_EXPERTS, spec) == name


@pytest.mark.parametrize(
    ("op", "spec", "reason"),
    [
        (MXFP4_LINEAR, replace(MXFP4_SPEC, rounded_inputs=False), "activations are not rounded to it"),
        (MXFP4_LINEAR, replace(MXFP4_SPEC, dtype=torch.float16), "not of torch.float16"),
        (MXFP4_LINEAR, replace(MXFP4_SPEC, in_features=384), "multiples of 32, not 384 and 64"),
        (MXFP4_LINEAR, replace(MXFP4_SPEC, out_features=48), "not 256 and 48"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, rounded_inputs=False), "from 256 tokens on to FP8"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, dtype=torch.float16), "not of torch.float16"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, activation="gelu"), "with silu, not with gelu"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, bias=True), "used without biases"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, total=8), "where all experts are local, not 4 of 8"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, hidden_size=384), "not for 384 and 256"),
        (MXFP4_EXPERTS, replace(MXFP4_EXPERTS_SPEC, intermediate_size=384), "not for 256 and 384"),
    ],
)
def test_what_is_not_multiplied_as_mxfp4_is_tritons(op, spec, reason):
    with fake_aiter("gfx950"):
        kernels = kernel_set(Target("rocm", "gfx950"))
        assert kernels.chosen(op, spec) == "triton"
        assert reason in dict(kernels.choices()[0].passed_over)["aiter"]


@pytest.mark.parametrize(
    ("op", "spec"), [(MXFP4_LINEAR, MXFP4_SPEC), (MXFP4_EXPERTS, MXFP4_EXPERTS_SPEC)], ids=["linear", "experts"]
)
def test_mxfp4_is_for_gfx950_alone(op, spec):
    for arch, name in (("gfx942", "triton"), ("gfx950", "aiter")):
        with fake_aiter(arch):
            kernels = kernel_set(Target("rocm", arch))
            assert kernels.chosen(op, spec) == name
            if name == "triton":
                assert "on gfx950, not on gfx942" in dict(kernels.choices()[0].passed_over)["aiter"]


def test_what_aiter_calls_even_is_what_amd_quark_does():
    # Quarters and eighths have every tie, the others sizes of every exponent and largest numbers on both sides of 1.75.
    few = torch.randint(-48, 49, (64, 256), generator=torch.Generator().manual_seed(0)) / 8
    many = (
        random(64, 256, dtype=torch.float32, device=CPU) * random(64, 1, dtype=torch.float32, device=CPU).mul(9).exp2()
    )
    x = torch.cat((few, many, torch.zeros(1, 256))).bfloat16()
    with fake_aiter("gfx950") as fake:
        packed, scales = fake.quant_mxfp4_hip(x, round_mode=EVEN)
        found = importlib.import_module("aiter._mxfp4").unpack(packed, scales)
    assert torch.equal(found, round_groups(x.float()))


def round_up(x: torch.Tensor) -> torch.Tensor:
    """To MXFP4 with the smallest scale that cuts no number."""
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    scales = group_scales(x)
    scales = torch.where(largest > 6 * scales, 2 * scales, scales)[..., None]
    size = (groups / scales).abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step * groups.sign() * scales).flatten(-2).to(x.dtype)


def test_experts_in_mxfp4_differ_from_the_reference_by_how_a_scale_is_rounded_and_nothing_else(monkeypatch):
    spec = replace(MXFP4_EXPERTS_SPEC, count=4)
    layer = Mxfp4Weights(*mxfp4(4, 512, 256, seed=1, device=CPU), *mxfp4(4, 256, 256, seed=2, device=CPU))
    x = random(40, 256, dtype=torch.bfloat16, device=CPU)
    weights, experts = routed(40, 4, 2, CPU)
    as_defined = ReferenceMxfp4Experts(spec)(x, weights, experts, layer)
    monkeypatch.setattr("atom_core.kernels.mxfp4_experts.reference.round_groups", round_up)
    expected = ReferenceMxfp4Experts(spec)(x, weights, experts, layer)
    with fake_aiter("gfx950"):
        kernel = kernel_set(Target("rocm", "gfx950"), {"mxfp4_experts": "aiter"}).select(MXFP4_EXPERTS, spec)
        kernel.adopt(layer)
        found = kernel(x, weights, experts, layer)
    assert_near(found, expected, roundings=4)
    with pytest.raises(AssertionError, match="differs by"):
        assert_near(as_defined, expected, roundings=4)


def test_scales_that_graphs_have_captured_stay_where_they_are():
    with fake_aiter("gfx950"):
        kernel = kernel_set(Target("rocm", "gfx950")).select(MXFP4_LINEAR, replace(MXFP4_SPEC, bias=False))
        places = []
        for seed in (1, 2):
            kernel.adopt(*mxfp4(64, 256, seed=seed, device=CPU))
            places.append(kernel.shuffled().data_ptr())
    assert places[0] == places[1]


def test_an_enum_that_an_older_aiter_lacks_is_an_error_when_the_model_is_built():
    with fake_aiter("gfx942") as fake:
        del fake.QuantType
        with pytest.raises(ValueError, match=r"The installed aiter has no aiter\.QuantType\.No"):
            kernel_set(Target("rocm", "gfx942")).select(EXPERTS, EXPERTS_SPEC)


def test_every_implementation_says_that_a_gpu_of_nvidias_is_not_for_it():
    for op in OPS:
        for implementation in op.implementations:
            if implementation.name.startswith("aiter"):
                # No spec is looked at before the device is.
                assert implementation.supports(None, Target("cuda", "sm90")) == "aiter's kernels are for AMD's GPUs."


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qk_norm": False}, "norms q and k, and this model has no q"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 96, "rotary_dim": 96}, "head sizes 64, 128 and 256, not 96"),
        ({"head_dim": 64, "rotary_dim": 64, "interleaved": True}, "interleaved rope for head sizes 128 and 256"),
        ({"rotary_dim": 2}, "rotary dimensions in multiples of 4, not 2"),
    ],
)
def test_what_aiter_cannot_fill_a_cache_from(changes, reason):
    shape = {
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 128,
        "rotary_dim": 128,
        "interleaved": False,
        "qk_norm": True,
        "dtype": torch.bfloat16,
    }
    spec = QkvCacheSpec(QkvSpec(**shape | changes), changes.get("dtype", torch.bfloat16), "plain")
    with fake_aiter("gfx942"), pytest.raises(ValueError, match=reason):
        kernel_set(Target("rocm", "gfx942"), {"qk_norm_rope_cache": "aiter"}).select(QK_NORM_ROPE_CACHE, spec)


def test_what_rounds_or_reorders_is_used_on_request_alone():
    with fake_aiter("gfx950"):
        kernels = kernel_set(Target("rocm", "gfx950"))
        spec = PagedAttentionSpec(**ATTENTION_SPEC)
        assert kernels.select(ATTENTION, spec).order == "plain"
        qkv = QkvSpec(8, 1, 128, 128, False, True, torch.bfloat16)
        assert kernels.chosen(QK_NORM_ROPE_CACHE, QkvCacheSpec(qkv, torch.bfloat16, "plain")) == "triton"
        assert kernel_set(Target("rocm", "gfx950"), {"attention": "aiter_shuffled"}).select(ATTENTION, spec).order == (
            SHUFFLED
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "for bfloat16, not for torch.float16"),
        ({"key_dim": 64}, "keys and values of 128, not of 64 and 128"),
        ({"value_dim": 256}, "keys and values of 128, not of 128 and 256"),
        ({"conv_width": 5}, "over 2 to 4 tokens, not over 5"),
        ({"state_dtype": torch.float16}, "states in float32 and bfloat16, not in torch.float16"),
    ],
)
def test_what_aiter_has_no_delta_rule_for(changes, reason):
    with fake_aiter("gfx942"), pytest.raises(ValueError, match=reason):
        kernel_set(Target("rocm", "gfx942"), {"gated_delta_net": "aiter"}).select(
            GATED_DELTA_NET, replace(DELTA_SPEC, **changes)
        )


@every_gpu
def test_aiters_delta_rule_takes_more_launches_so_it_is_used_on_request(arch):
    with fake_aiter(arch):
        kernels = kernel_set(Target("rocm", arch))
        assert kernels.chosen(GATED_DELTA_NET, DELTA_SPEC) == "triton"
        (choice,) = kernels.choices()
        assert "ATOM_KERNELS=gated_delta_net=aiter asks for it." in dict(choice.passed_over)["aiter"]
        kernel = kernel_set(Target("rocm", arch), {"gated_delta_net": "aiter"}).select(GATED_DELTA_NET, DELTA_SPEC)
    prompts = BatchShape((1, 1, 100, 4000), 5000)
    own = attention_keys(kernel.others, prompts, CPU)
    assert attention_keys(kernel, prompts, CPU) == [
        (id(kernel), key) for key in (*own, ("aiter", (False, False), True))
    ]
    decodes = replace(prompts, queries=(1, 1))
    assert len(attention_keys(kernel, decodes, CPU)) == len(attention_keys(kernel.others, decodes, CPU))


PROMPT = DeltaCase("", (Request(5), Request(3, False)), key_heads=1, value_heads=2, key_dim=128, value_dim=128)


def aiters_delta_rule(case):
    """For a case's layer."""
    kernels = kernel_set(Target("rocm", "gfx942"), {"gated_delta_net": "aiter"})
    return kernels.select(GATED_DELTA_NET, case.spec(torch.bfloat16))


def test_inputs_of_a_convolution_in_another_dtype_are_tritons():
    for conv_dtype, ours in ((torch.bfloat16, 0), (torch.float32, 1)):
        inputs, ran = delta_batch(PROMPT, torch.bfloat16, CPU, conv_dtype=conv_dtype), []

        def others(*args, ran=ran):
            ran.append(args)
            OneByOne(gated_delta_rule)(*args)

        with fake_aiter("gfx942"), without_triton(CPU):
            kernel = aiters_delta_rule(PROMPT)
            kernel.others = others
            check_delta(kernel, inputs, times=2)
        assert len(ran) == ours


def test_slot_0_is_nobodys_for_aiters_delta_rule_too():
    inputs = delta_batch(PROMPT, torch.bfloat16, CPU)
    inputs.batch.states.slots[1] = 0
    before = [it.clone() for it in inputs.cache.tensors]
    with fake_aiter("gfx942"), without_triton(CPU):
        inputs.run(aiters_delta_rule(PROMPT))
    mine = inputs.batch.states.slots[0, 0].item()
    for found, was in zip(inputs.cache.tensors, before, strict=True):
        assert not torch.equal(found[mine], was[mine])
        assert not found[mine].isnan().any()
        others = [slot for slot in range(len(was)) if slot != mine]
        torch.testing.assert_close(found[others], was[others], rtol=0, atol=0, equal_nan=True)


def call(order=SHUFFLED, page_size=16, query_len=1, uniform=True, **changes):
    return Call(PagedAttentionSpec(**ATTENTION_SPEC | changes), order, page_size, query_len, uniform)


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        (call(), "pa_fwd_asm"),
        (call(query_len=2), "pa_fwd_asm"),
        (call(num_heads=16), "pa_fwd_asm"),
        (call(num_heads=17), "pa_decode_gluon"),
        (call(query_len=3), "pa_decode_gluon"),
        (call(page_size=64), "pa_decode_gluon"),
        (call(head_dim=64, scale=0.125), "pa_decode_gluon"),
        (call(scale=0.1), "pa_decode_gluon"),
        (call(window=100), "pa_decode_gluon"),
        (call(sinks=True), "pa_decode_gluon"),
        (call(dtype=torch.float16, cache_dtype=torch.float16), "pa_decode_gluon"),
        (call(cache_dtype=torch.float8_e4m3fn), "pa_decode_gluon"),
        (call(page_size=256, cache_dtype=torch.float8_e4m3fn), "pa_persistent_fwd"),
        (call(page_size=1024, cache_dtype=torch.float8_e4m3fnuz), "pa_persistent_fwd"),
        (call(page_size=256, cache_dtype=torch.float8_e4m3fn, query_len=3), "pa_persistent_fwd"),
        (call(page_size=1024), "pa_decode_gluon"),
        (call(page_size=1024, cache_dtype=torch.float8_e5m2), "pa_decode_gluon"),
        (call(page_size=1024, cache_dtype=torch.float8_e4m3fn, sinks=True), "pa_decode_gluon"),
        (call(page_size=1024, cache_dtype=torch.float8_e4m3fn, scale=0.1), "pa_decode_gluon"),
        (call(page_size=1024, cache_dtype=torch.float8_e4m3fn, num_heads=24, num_kv_heads=3), "pa_decode_gluon"),
        (call(page_size=256, cache_dtype=torch.float8_e4m3fn, window=100), "unified_attention"),
        (call(page_size=256, cache_dtype=torch.float8_e4m3fn, num_heads=65), "unified_attention"),
        (call(page_size=256, cache_dtype=torch.float8_e4m3fn, uniform=False), "unified_attention"),
        (call(page_size=256), "unified_attention"),
        (call(soft_cap=30.0), "unified_attention"),
        (call(page_size=32), "unified_attention"),
        (call(head_dim=256, scale=1 / 16), "unified_attention"),
        (call(num_heads=65), "unified_attention"),
        (call(order="plain"), "unified_attention"),
        (call(query_len=9, uniform=False), "mha_batch_prefill"),
        (call(query_len=9), "mha_batch_prefill"),
        (call(query_len=9, sinks=True), "unified_attention"),
        (call(query_len=9, cache_dtype=torch.float8_e4m3fn), "unified_attention"),
        (call(query_len=9, head_dim=64), "unified_attention"),
        (call(query_len=9, window=1), "unified_attention"),
        (call(query_len=1, uniform=False), "unified_attention"),
    ],
)
def test_who_takes_a_batch(asked, kernel):
    choice = choose(asked)
    assert choice.kernel == kernel
    assert all(reason.endswith(".") for _, reason in choice.passed_over)


def test_a_batch_that_no_kernel_takes_is_an_error_with_every_reason():
    message = (
        r"pa_fwd_asm: It reads shuffled pages\.; .*unified_attention: It takes pages of 16 tokens or more, not 1\."
    )
    with pytest.raises(ValueError, match=message):
        choose(call(order="plain", page_size=1))


def test_windows_are_counted_as_each_kernel_counts_them():
    assert [inclusive_window(window) for window in (None, 1, 128)] == [(-1, -1), (0, 0), (127, 0)]
    assert [gluon_window(window, 2) for window in (None, 1, 128)] == [0, 3, 130]


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 70])
def test_results_in_float32_are_those_of_exact_products(rows):
    x, weight = torch.randn(rows, 272).half(), torch.randn(48, 272).half()
    with fake_aiter("gfx942"):
        spec = LinearSpec(272, 48, False, torch.float16, float32_result=True)
        kernels = kernel_set(Target("rocm", "gfx942"))
        kernel = kernels.select(LINEAR, spec)
        assert not kernel.adopt(weight, None)
        found = kernel(x, weight, None)
        assert kernels.chosen(LINEAR, replace(spec, bias=True)) == "triton"
        # Few rows are our own kernels'.
        assert [call.path for call in calls()] == (["aiter.tuned_gemm.hipb_gemm"] if rows > 16 else [])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


def shuffled(pages=3, heads=2, tokens=16, dim=32, dtype=torch.bfloat16):
    both = torch.randn(pages, 2, heads * tokens * dim).to(dtype)
    return KVCacheView.of_shuffled(both[:, 0], both[:, 1], heads, tokens)


def test_a_kernel_that_reads_another_order_than_was_written_stops():
    cache = shuffled()
    cache.expect(SHUFFLED, torch.bfloat16)
    for order, dtype in (("plain", torch.bfloat16), (SHUFFLED, torch.float16)):
        with pytest.raises(AssertionError, match="the cache is CacheLayout"):
            cache.expect(order, dtype)


def test_sides_that_kernels_would_go_through_by_wrong_strides_are_no_cache():
    cache = shuffled()
    with pytest.raises(AssertionError):
        KVCacheView(cache.key, cache.value.contiguous(), SHUFFLED)
    with pytest.raises(AssertionError):
        KVCacheView(cache.key, cache.key, SHUFFLED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz], ids=str)
def test_shuffled_pages_are_read_back_as_they_are_defined(dtype):
    cache, together = shuffled(dtype=dtype), 16 // dtype.itemsize
    plain = cache.as_plain()
    assert plain.page_size == cache.page_size == 16
    for page, head, token, number in ((0, 0, 0, 0), (1, 1, 9, 17), (2, 0, 15, 31)):
        key = cache.key[page, head, number // together, token, number % together]
        value = cache.value[page, head, token // together, number, token % together]
        assert plain.key[page, head, token, number].float() == key.float()
        assert plain.value[page, head, token, number].float() == value.float()
