"""Which of aiter's versions quantises what behind a sum over ranks, and what it is told."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.fp8_inputs import InputForm
from atom_plugin.common.aiter_all_reduce import GroupQuantizer, quantizes

FNUZ, FN = torch.float8_e4m3fnuz, torch.float8_e4m3fn
FORM = InputForm(FN, 128)


class Communicator:
    """aiter's since 0.1.20, which sums zeros of others' up."""

    def custom_fused_ar_rms_per_group_quant(
        self, x, residual, weight, eps, group_size=128, use_1stage=False, emit_bf16=False, transpose_scale=False
    ):
        assert use_1stage
        assert not emit_bf16
        scales = torch.arange(float(x.numel() // group_size)).view(len(x), -1)
        return x.to(FN), x + residual, scales.t().contiguous().t() if transpose_scale else scales


class InRows:
    """aiter's of 0.1.19, whose scales are those of a token side by side."""

    def custom_fused_ar_rms_per_group_quant(
        self, x, residual, weight, eps, group_size=128, use_1stage=False, emit_bf16=False
    ):
        return Communicator().custom_fused_ar_rms_per_group_quant(
            x, residual, weight, eps, group_size, use_1stage, emit_bf16
        )


@pytest.mark.parametrize(("communicator", "most"), [(Communicator(), 80), (InRows(), 1), (object(), 0)])
def test_scales_of_a_group_lie_side_by_side(communicator, most):
    it = GroupQuantizer(communicator, "gfx950")
    for rows in (1, 2, 80):
        x, residual = torch.ones(rows, 256, dtype=torch.bfloat16), torch.ones(rows, 256, dtype=torch.bfloat16)
        assert it.quantizes(x, FORM) == (rows <= most)
        if rows <= most:
            (values, scales), summed = it.quantized(x, residual, x[0], 1e-5, FORM)
            assert torch.equal(values.float(), x.float())
            assert torch.equal(summed, x + residual)
            assert scales.is_contiguous()
            assert torch.equal(scales, torch.arange(2.0 * rows).view(rows, 2).t())


@pytest.mark.parametrize(
    ("size", "form", "arch", "fits"),
    [
        (7168, InputForm(FNUZ, 128), "gfx942", True),
        (7168, InputForm(FN, 128), "gfx942", False),
        (7168, InputForm(FN, 128), "gfx950", True),
        (7168, InputForm(FN, None), "gfx950", False),
        (7168, InputForm(FN, 96), "gfx950", False),
        (7168, InputForm(FN, 1024), "gfx950", False),
        (7200, InputForm(FN, 128), "gfx950", False),
    ],
)
def test_it_quantises_whole_groups_in_the_gpus_own_form(size, form, arch, fits):
    assert quantizes(size, form, arch) is fits
