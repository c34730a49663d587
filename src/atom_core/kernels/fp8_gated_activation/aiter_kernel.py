"""Gated activations that quantise by aiter: in HIP SiLU with groups, for widths that its threads share out evenly.

For others there is one of its kernels in Triton, which has a row as its group where a token has one scale.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, room
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.kernels.fp8_gated_activation import Fp8GatedActivationKernel


def in_hip(activation: Activation, size: int, form: InputForm) -> bool:
    """Whether the kernel in HIP takes rows of ``size`` numbers.

    A thread of it has 24 of a row of 4097 to 6144 numbers, so threads do not share out groups of 128; it goes on all
    the same, and scales are wrong.
    """
    return activation == "silu" and form.group == 128 and (size <= 4096 or 6144 < size <= 8192)


def build(activation: Activation, size: int, form: InputForm) -> Fp8GatedActivationKernel:
    """The kernel of ``activation``, once its function is known to be there."""
    if in_hip(activation, size, form):
        require("aiter.silu_and_mul_quant")
        return partial(_in_hip, form=form)
    require("aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul")
    return partial(_in_triton, activation=activation, form=form)


def _in_hip(x: torch.Tensor, form: InputForm) -> QuantizedInput:
    return QuantizedInput(*_silu(x, form.dtype, form.group))


def _in_triton(x: torch.Tensor, activation: str, form: InputForm) -> QuantizedInput:
    return QuantizedInput(*_activate(x, form.dtype, form.group, activation))


def _room(x: torch.Tensor, dtype: torch.dtype, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.is_contiguous(), "aiter's activations take rows to follow each other"
    values, scales = room(x.shape[0], x.shape[1] // 2, InputForm(dtype, group), x.device)
    return values, scales


@custom_op("aiter_fp8_silu_and_mul", _room)
def _silu(x: torch.Tensor, dtype: torch.dtype, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = _room(x, dtype, group)
    if len(x):
        aiter_function("aiter.silu_and_mul_quant")(values, x, scales, group, shuffle_scale=True)
    return values, scales


@custom_op("aiter_fp8_gated_activation", lambda x, dtype, group, activation: _room(x, dtype, group))
def _activate(
    x: torch.Tensor, dtype: torch.dtype, group: int | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = _room(x, dtype, group)
    if len(x):
        # Triton's groups are powers of two; what a row lacks to one counts as zeros.
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
