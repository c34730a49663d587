"""Which implementation runs an op, and what is said when none can."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from atom_core.kernels import OPS, kernel_set
from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.attention.reference import ReferenceAttention
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.qk_norm_rope import QkvSpec
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, QkvCacheSpec
from atom_core.kernels.select import Choice, Implementation, KernelSet, Op, Target, always

CPU = Target("cpu", "x86_64")
CUDA = Target("cuda", "sm90")
ROCM = Target("rocm", "gfx942")

ATTENTION_SPEC = PagedAttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, dtype=torch.bfloat16, cache_dtype=torch.bfloat16
)
QKV_SPEC = QkvCacheSpec(QkvSpec(4, 2, 64, 64, False, False, torch.bfloat16), torch.bfloat16, "plain")


def implementation(name, reason=None):
    """One that says ``reason`` (None: it can run), and whose kernel is its own name in a list."""
    return Implementation(name, lambda spec, target: reason, lambda spec, target: [name])


def kernels(target, *implementations, forced=None, contributed=None):
    op = Op("toy", implementations)
    return op, KernelSet(target, (op,), {"toy": forced} if forced else {}, {"toy": contributed} if contributed else {})


@pytest.mark.parametrize(
    ("target", "order"),
    [
        (ROCM, ["aiter", "triton", "framework", "reference"]),
        (CUDA, ["triton", "framework", "reference"]),
        (CPU, ["framework", "reference"]),
    ],
    ids=str,
)
def test_the_first_in_the_targets_order_that_can_run_is_chosen(target, order):
    for index, expected in enumerate(order):
        available = [implementation(name, "no" if order.index(name) < index else None) for name in reversed(order)]
        own = [it for it in available if it.name != "framework"]
        framework = next(it for it in available if it.name == "framework")
        op, selection = kernels(target, *own, contributed=framework)
        assert selection.select(op, "spec") == [expected]
        (choice,) = selection.choices()
        assert choice == Choice("toy", expected, False, tuple((name, "no") for name in order[:index]))


def test_an_excluded_one_is_passed_over_with_its_reason_and_can_be_forced():
    op = Op("toy", (implementation("triton"), implementation("reference")))
    excluded = {("toy", "triton"): "Not here."}
    selection = KernelSet(CUDA, (op,), excluded=excluded)
    assert selection.select(op, "spec") == ["reference"]
    assert selection.choices() == [Choice("toy", "reference", False, (("triton", "Not here."),))]
    assert KernelSet(CUDA, (op,), {"toy": "triton"}, excluded=excluded).select(op, "spec") == ["triton"]


def test_a_forced_one_is_used_though_a_better_one_could():
    op, selection = kernels(CUDA, implementation("triton"), implementation("reference"), forced="reference")
    assert selection.select(op, "spec") == ["reference"]
    assert selection.choices() == [Choice("toy", "reference", True, ())]


def test_one_that_the_targets_order_lacks_comes_last_and_can_be_forced():
    op, selection = kernels(CPU, implementation("triton"), implementation("reference"))
    assert selection.select(op, "spec") == ["reference"]
    op, selection = kernels(CPU, implementation("triton"), implementation("reference"), forced="triton")
    assert selection.select(op, "spec") == ["triton"]


def test_a_forced_one_that_cannot_run_is_an_error_that_says_why():
    op, selection = kernels(CUDA, implementation("triton", "It is too hot."), forced="triton")
    with pytest.raises(ValueError, match=re.escape("toy=triton, which cannot run on cuda (sm90): It is too hot.")):
        selection.select(op, "spec")


def test_triton_forced_on_a_cpu_is_an_error():
    selection = kernel_set(CPU, {"attention": "triton"})
    message = "ATOM_KERNELS asks for attention=triton, which cannot run on cpu (x86_64): Triton kernels need a GPU. "
    with pytest.raises(ValueError, match=re.escape(message)):
        selection.select(ATTENTION, ATTENTION_SPEC)


def test_an_unknown_op_is_an_error_that_lists_the_ops():
    with pytest.raises(ValueError, match=r"unknown op 'atention'; ops: all_reduce_norm, attention, .*shared_experts\."):
        kernel_set(CPU, {"atention": "reference"})


def test_an_unknown_implementation_is_an_error_that_lists_them():
    with pytest.raises(
        ValueError,
        match=r"attention=tritn, .*of attention here: torch, reference, aiter, aiter_shuffled, triton\.",
    ):
        kernel_set(CPU, {"attention": "tritn"})


def test_where_nothing_can_run_every_reason_is_given():
    op, selection = kernels(CUDA, implementation("triton", "Too hot."), implementation("reference", "Too cold."))
    with pytest.raises(ValueError, match=r"No implementation of toy .* triton: Too hot.; reference: Too cold."):
        selection.select(op, "spec")


def test_equal_calls_are_decided_once_and_each_gets_a_kernel_of_its_own():
    asked = []

    def supports(spec, target):
        asked.append(spec)

    op, selection = kernels(CPU, Implementation("reference", supports, lambda spec, target: [spec]))
    first, second = selection.select(op, "a"), selection.select(op, "a")
    assert first is not second
    selection.select(op, "b")
    assert asked == ["a", "b"]
    assert list(selection.kernels()) == [["a"], ["b"]]


def test_choices_are_in_the_order_of_the_ops_without_repetitions():
    selection = kernel_set(CPU)
    selection.select(ATTENTION, ATTENTION_SPEC)
    selection.select(LINEAR, LinearSpec(8, 8, False, torch.float32))
    selection.select(LINEAR, LinearSpec(8, 16, False, torch.float32))
    assert [choice.op for choice in selection.choices()] == ["linear", "attention"]


def test_every_op_has_a_reference_that_comes_last_or_can_be_run_by_others():
    for op in OPS:
        assert op.implementations[-1].name in ("reference", "separate")


@pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
def test_a_gpu_takes_triton_for_what_triton_can(target):
    from atom_core.kernels.attention.triton_kernel import TritonAttention

    selection = kernel_set(target, with_aiter=False)
    assert isinstance(selection.select(ATTENTION, ATTENTION_SPEC), TritonAttention)
    selection.select(QK_NORM_ROPE_CACHE, QKV_SPEC)
    assert {choice.implementation for choice in selection.choices()} == {"triton"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 512}, "head sizes up to 256, not 512"),
        ({"cache_dtype": torch.float16}, "a cache in the model's dtype torch.bfloat16 or in FP8, not torch.float16"),
        ({"cache_dtype": torch.float8_e4m3fnuz}, "Triton has torch.float8_e4m3fnuz on AMD alone."),
        ({"dtype": torch.float64, "cache_dtype": torch.float64}, "not torch.float64"),
    ],
)
def test_what_the_triton_attention_cannot_do_falls_to_the_reference_with_the_reason(change, reason):
    selection = kernel_set(CUDA)
    assert isinstance(selection.select(ATTENTION, replace(ATTENTION_SPEC, **change)), ReferenceAttention)
    assert reason in dict(selection.choices()[0].passed_over)["triton"]


def test_pages_of_a_foreign_order_are_written_by_none_of_ours():
    with pytest.raises(ValueError, match=r"shuffled ones, not 'foreign' ones.*shuffled ones, not 'foreign' ones"):
        kernel_set(CUDA).select(QK_NORM_ROPE_CACHE, replace(QKV_SPEC, order="foreign"))


def test_a_cache_of_another_dtype_is_written_by_the_reference():
    selection = kernel_set(CUDA)
    selection.select(QK_NORM_ROPE_CACHE, replace(QKV_SPEC, cache_dtype=torch.float16))
    assert selection.choices()[0].implementation == "reference"


@pytest.mark.parametrize(
    ("target", "cache_dtype", "reason"),
    [
        (CUDA, torch.float8_e4m3fn, None),
        (CUDA, torch.float8_e5m2, None),
        (Target("cuda", "sm120"), torch.float8_e4m3fn, None),
        (ROCM, torch.float8_e4m3fn, None),
        (ROCM, torch.float8_e4m3fnuz, None),
        (Target("cuda", "sm80"), torch.float8_e4m3fn, "Triton has torch.float8_e4m3fn from sm89 on, not on sm80."),
        (Target("cuda", "sm80"), torch.float8_e5m2, None),
        (CUDA, torch.float8_e4m3fnuz, "Triton has torch.float8_e4m3fnuz on AMD alone."),
    ],
    ids=str,
)
def test_which_gpu_has_which_fp8_cache(target, cache_dtype, reason):
    selection = kernel_set(target, with_aiter=False)
    selection.select(ATTENTION, replace(ATTENTION_SPEC, cache_dtype=cache_dtype))
    selection.select(QK_NORM_ROPE_CACHE, replace(QKV_SPEC, cache_dtype=cache_dtype))
    for choice in selection.choices():
        assert dict(choice.passed_over).get("triton") == reason


@pytest.mark.parametrize("target", [CPU, CUDA], ids=str)
def test_a_cache_that_nothing_reads_or_writes_is_refused(target):
    for op, spec in ((ATTENTION, ATTENTION_SPEC), (QK_NORM_ROPE_CACHE, QKV_SPEC)):
        with pytest.raises(ValueError, match=r"reference: A cache has a floating-point dtype .* not torch\.uint8"):
            kernel_set(target).select(op, replace(spec, cache_dtype=torch.uint8))


@pytest.mark.parametrize(
    ("target", "version", "said"),
    [
        (
            CUDA,
            "3.10.0",
            "2 to 64 rows are multiplied by a slower kernel. The kernel for Hopper is known",
        ),
        (CUDA, "3.8.1", ""),
        (Target("cuda", "sm80"), "3.10.0", ""),
        (ROCM, "3.10.0", ""),
    ],
    ids=str,
)
def test_a_triton_without_the_faster_products_is_remarked_upon(monkeypatch, target, version, said):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    selection = kernel_set(target, with_aiter=False)
    selection.select(LINEAR, LinearSpec(64, 64, False, torch.bfloat16))
    (choice,) = selection.choices()
    assert choice.implementation == "triton"
    assert (choice.remark or "").startswith(said)
    assert bool(choice.remark) == bool(said)


def test_without_triton_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    selection = kernel_set(CUDA)
    selection.select(ATTENTION, ATTENTION_SPEC)
    said = dict(selection.choices()[0].passed_over)
    assert said["triton"] == "Triton is not installed; it comes with PyTorch's GPU builds."


def test_always_is_always_a_yes():
    assert always("anything", ROCM) is None


def test_a_target_is_read_from_a_device():
    assert Target.of(torch.device("cpu")).kind == "cpu"
    assert str(CUDA) == "cuda (sm90)"


def test_selecting_for_amd_imports_no_vendor_package_and_for_a_cpu_no_triton():
    code = """
import sys, torch
from atom_core.kernels import kernel_set
from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.select import Target
spec = PagedAttentionSpec(4, 2, 64, 0.125, torch.bfloat16, torch.bfloat16)
before = "triton" in sys.modules
kernel_set(Target("cpu", "x86_64")).select(ATTENTION, spec)
assert ("triton" in sys.modules) == before
kernel_set(Target("rocm", "gfx942"), with_aiter=False).select(ATTENTION, spec)
assert "aiter" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ.copy(), check=True)
