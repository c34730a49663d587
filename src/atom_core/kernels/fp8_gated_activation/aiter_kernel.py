"""Gated activations that quantise by aiter: SiLU with groups in HIP, for widths that its threads divide evenly.

Otherwise it is one of aiter's Triton kernels, whose group is a whole row where a token has one scale.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, empty_quantized
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.kernels.fp8_gated_activation import Fp8GatedActivationKernel


def in_hip(activation: Activation, size: int, form: InputForm) -> bool:
    """Whether the HIP kernel supports rows of ``size`` elements.

    For rows of 4097 to 6144 elements its threads have 24 elements each, which does not divide groups of 128; the kernel
    runs anyway, with wrong scales.
    """
    return activation == "silu" and form.group == 128 and (size <= 4096 or 6144 < size <= 8192)


def build(activation: Activation, size: int, form: InputForm) -> Fp8GatedActivationKernel:
    """The kernel of ``activation``; it requires that aiter has the function."""
    if in_hip(activation, size, form):
        require("aiter.silu_and_mul_quant")
        return partial(_in_hip, form=form)
    require("aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul")
    return partial(_in_triton, activation=activation, form=form)


def _in_hip(x: torch.Tensor, form: InputForm) -> QuantizedInput:
    return QuantizedInput(*_silu(x, form.dtype, form.group))


def _in_triton(x: torch.Tensor, activation: str, form: InputForm) -> QuantizedInput:
    return QuantizedInput(*_activate(x, form.dtype, form.group, activation))


def _empty_quantized(x: torch.Tensor, dtype: torch.dtype, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.is_contiguous(), "aiter's activations take rows to follow each other"
    values, scales = empty_quantized(x.shape[0], x.shape[1] // 2, InputForm(dtype, group), x.device)
    return values, scales


@custom_op("aiter_fp8_silu_and_mul", _empty_quantized)
def _silu(x: torch.Tensor, dtype: torch.dtype, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = _empty_quantized(x, dtype, group)
    if len(x):
        aiter_function("aiter.silu_and_mul_quant")(values, x, scales, group, shuffle_scale=True)
    return values, scales


@custom_op("aiter_fp8_gated_activation", lambda x, dtype, group, activation: _empty_quantized(x, dtype, group))
def _activate(
    x: torch.Tensor, dtype: torch.dtype, group: int | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = _empty_quantized(x, dtype, group)
    if len(x):
        # Triton's groups are powers of two; a shorter row is padded with zeros.
        aiter_function("aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul")(
            x,
            out=values,
            scale=scales,
            activation=activation,
            dtype_quant=dtype,
            transpose_scale=group is not None,
            quant_block_size=group or 1 << (values.shape[1] - 1).bit_length(),
        )
    return values, scales
