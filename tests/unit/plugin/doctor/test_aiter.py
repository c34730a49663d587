"""What the doctor says of aiter on AMD's GPUs."""

from __future__ import annotations

import pytest

from atom_core.kernels.select import Target
from atom_plugin.common.settings import Settings, readable_settings
from atom_plugin.doctor.aiter import check_aiter, rocm_line
from tests.aiter_fake import ARCHITECTURES, fake_aiter

GFX942 = Target("rocm", "gfx942")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_that_is_called_is_there(arch):
    with fake_aiter(arch):
        assert list(check_aiter(Target("rocm", arch), Settings())) == []


def test_aiter_missing():
    (finding,) = check_aiter(GFX942, Settings())
    assert finding.problem == "aiter, which our models use on gfx942, is not installed."
    assert "https://github.com/ROCm/aiter" in finding.remedy
    assert "ATOM_AITER=0" in finding.remedy


def test_each_missing_function_is_named_with_the_op_that_calls_it():
    with fake_aiter("gfx942") as fake:
        del fake.pa_fwd_asm, fake.silu_and_mul
        found = [finding.problem for finding in check_aiter(GFX942, Settings())]
    assert found == [
        "The installed aiter lacks aiter.pa_fwd_asm, which attention calls.",
        "The installed aiter lacks aiter.silu_and_mul, which gated_activation calls.",
    ]


def test_an_aiter_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('no AMD device')")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = check_aiter(GFX942, Settings())
    assert finding.problem == "aiter is installed and cannot be imported: RuntimeError: no AMD device."


@pytest.mark.parametrize("target", [Target("cuda", "sm90"), Target("cpu", ""), Target("rocm", "gfx90a")], ids=str)
def test_where_it_is_not_used_nothing_is_said(target):
    assert list(check_aiter(target, Settings())) == []


def test_switched_off_nothing_is_said():
    assert list(check_aiter(GFX942, readable_settings({"ATOM_AITER": "0", "ATOM_KERNELS": "nonsense"}))) == []


def test_the_gpu_and_rocm_are_named():
    assert rocm_line(GFX942).startswith("GPU gfx942, ROCm ")
    assert rocm_line(Target("cpu", "x86_64")) is None
