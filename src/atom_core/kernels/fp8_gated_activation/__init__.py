"""The gated MLP's activation, ``act(gate) * up`` over ``[gate | up]``, quantised for the FP8 product after it.

As :mod:`atom_core.kernels.gated_activation` and :mod:`atom_core.kernels.fp8_linear` or
:mod:`atom_core.kernels.fp8_block_linear` define it. A kernel may or may not round to 16 bits before it quantises, as
separate ops do. ``x``: ``[T, 2K]``, not modified; the result: ``[T, K]`` and its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom_core.kernels.aiter_library import why_no_aiter, why_not_fused
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_rms_norm import MAX_SIZE
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.kernels.triton_support import why_not_fused as why_not_fused_by_triton
from atom_core.types import Activation

#: Largest row for aiter's Triton kernel, which has a whole row in registers.
_AITER_MAX = 32768


@dataclass(frozen=True)
class Fp8GatedActivationSpec:
    """One gated activation: the function, the width of its result, its dtype, and the input form of the next product.

    ``separate``: the implementation chosen for each separate op; only the same implementation is fused.
    """

    activation: Activation
    size: int
    dtype: torch.dtype
    form: InputForm
    separate: tuple[tuple[str, str], ...]


Fp8GatedActivationKernel = Callable[[torch.Tensor], QuantizedInput]


def _aiter_supports(spec: Fp8GatedActivationSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target) or why_not_fused(spec.separate):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's activations are for numbers of two bytes, not for {spec.dtype}."
    if spec.activation == "clamped_swiglu":
        return "None of aiter's activations that quantise to FP8 is the clamped SwiGLU of GPT-OSS."
    if spec.size % 128:
        return f"aiter's activations that quantise take widths in multiples of 128, not {spec.size}."
    if spec.size > _AITER_MAX:
        return f"aiter's activations that quantise are used for rows of up to {_AITER_MAX} numbers, not of {spec.size}."
    return None


def _build_aiter(spec: Fp8GatedActivationSpec, target: Target) -> Fp8GatedActivationKernel | None:
    from atom_core.kernels.fp8_gated_activation.aiter_kernel import build  # imported only when chosen

    return build(spec.activation, spec.size, spec.form)


def _triton_supports(spec: Fp8GatedActivationSpec, target: Target) -> str | None:
    if reason := why_no_triton(target) or why_not_fused_by_triton(spec.separate):
        return reason
    if spec.form.group is None and spec.size > MAX_SIZE:
        return f"Triton's activations that quantise have rows of up to {MAX_SIZE} numbers, not of {spec.size}."
    return None


def _build_triton(spec: Fp8GatedActivationSpec, target: Target) -> Fp8GatedActivationKernel | None:
    from atom_core.kernels.fp8_gated_activation.triton_kernel import TritonFp8GatedActivation  # needs triton

    return TritonFp8GatedActivation(spec.activation, spec.form, overlaps(target))


#: "separate" is not a kernel: the layers run the separate ops.
FP8_GATED_ACTIVATION: Op[Fp8GatedActivationSpec, Fp8GatedActivationKernel | None] = Op(
    "fp8_gated_activation",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
