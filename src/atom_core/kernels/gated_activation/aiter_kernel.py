"""Gated activations by aiter; its clamped SwiGLU has GPT-OSS's limit and steepness built in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.kernels.gated_activation import GatedActivationKernel


def build(activation: Activation) -> GatedActivationKernel:
    """The kernel of ``activation``, after a check that aiter has its function."""
    path, kernel = {
        "silu": ("aiter.silu_and_mul", _silu),
        "gelu": ("aiter.gelu_and_mul", _gelu),
        "gelu_tanh": ("aiter.gelu_tanh_and_mul", _gelu_tanh),
        "clamped_swiglu": ("aiter.swiglu_and_mul", _swiglu),
    }[activation]
    require(path)
    return kernel


def _halved(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous(), "aiter's activations need contiguous rows"
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@custom_op("aiter_silu_and_mul", _halved)
def _silu(x: torch.Tensor) -> torch.Tensor:
    out = _halved(x)
    if len(x):
        aiter_function("aiter.silu_and_mul")(out, x)
    return out


@custom_op("aiter_gelu_and_mul", _halved)
def _gelu(x: torch.Tensor) -> torch.Tensor:
    out = _halved(x)
    if len(x):
        aiter_function("aiter.gelu_and_mul")(out, x)
    return out


@custom_op("aiter_gelu_tanh_and_mul", _halved)
def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    out = _halved(x)
    if len(x):
        aiter_function("aiter.gelu_tanh_and_mul")(out, x)
    return out


@custom_op("aiter_swiglu_and_mul", _halved)
def _swiglu(x: torch.Tensor) -> torch.Tensor:
    out = _halved(x)
    if len(x):
        aiter_function("aiter.swiglu_and_mul")(out, x)
    return out
