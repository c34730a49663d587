"""Kernels of aiter's, over the fake: what our code makes of them is what our references say."""

from __future__ import annotations

import re

import pytest
import torch

from atom_core.kernels import OPS, kernel_set
from atom_core.kernels.aiter_library import aiter_function, why_no_aiter
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR, Fp8BlockLinearSpec
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.kernels.select import Target
from tests.aiter_cases import CASES
from tests.aiter_fake import ARCHITECTURES, fake_aiter

CPU = torch.device("cpu")
NORM = RmsNormSpec(64, torch.bfloat16)
every_gpu = pytest.mark.parametrize("arch", ARCHITECTURES)


@every_gpu
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_reference(name, arch):
    with fake_aiter(arch):
        CASES[name](Target("rocm", arch), CPU)


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
        (RMS_NORM, RmsNormSpec(64, torch.float32), "numbers of two bytes, not for torch.float32"),
        (RMS_NORM, RmsNormSpec(8200, torch.bfloat16), "rows of up to 8192 numbers"),
        (LINEAR, LinearSpec(8, 8, False, torch.float32), "numbers of two bytes, not for torch.float32"),
        (FP8_LINEAR, Fp8LinearSpec(64, 64, False, torch.float16, "dynamic"), "not of torch.float16"),
        (FP8_LINEAR, Fp8LinearSpec(48, 64, False, torch.bfloat16, "dynamic"), "multiples of 16, not 48 and 64"),
        (FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(128, 64, False, torch.bfloat16), "not for 128 inputs and 64 outputs"),
        (FP8_BLOCK_LINEAR, Fp8BlockLinearSpec(128, 128, False, torch.float32), "not of torch.float32"),
        (GATED_ACTIVATION, GatedActivationSpec("silu", 8, torch.float32), "not for torch.float32"),
        (GATED_ACTIVATION, GatedActivationSpec("silu", 12, torch.bfloat16), "multiples of 8, not 12"),
    ],
)
def test_its_limits_are_said_in_words(op, spec, reason):
    with fake_aiter("gfx942"):
        kernels = kernel_set(Target("rocm", "gfx942"))
        kernels.chosen(op, spec)
        said = dict(kernels.choices()[0].passed_over)["aiter"]
    assert reason in said


def test_every_implementation_says_that_a_gpu_of_nvidias_is_not_for_it():
    for op in OPS:
        for implementation in op.implementations:
            if implementation.name.startswith("aiter"):
                # No spec is looked at before the device is.
                assert implementation.supports(None, Target("cuda", "sm90")) == "aiter's kernels are for AMD's GPUs."
