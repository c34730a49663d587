"""The gated MLP's middle, ``act(gate) * up`` over ``[gate | up]``, quantised for the FP8 product behind it.

As :mod:`atom_core.kernels.gated_activation` and :mod:`atom_core.kernels.fp8_linear` or
:mod:`atom_core.kernels.fp8_block_linear` define it, but nothing is rounded to 16 bits on the way. ``x``: ``[T, 2K]``,
left as it is; the result: ``[T, K]`` and its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom_core.config import Activation
from atom_core.kernels.aiter_library import why_no_aiter, why_not_fused
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.select import Implementation, Op, Target, always

#: The longest row that is given to aiter's Triton kernel, which has a whole row in registers.
_LONGEST = 32768


@dataclass(frozen=True)
class Fp8GatedActivationSpec:
    """One gated activation: the function, the width of its result, its dtype, and what the product behind it takes.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is what was chosen.
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
    if spec.size > _LONGEST:
        return f"aiter's activations that quantise are used for rows of up to {_LONGEST} numbers, not of {spec.size}."
    return None


def _build_aiter(spec: Fp8GatedActivationSpec, target: Target) -> Fp8GatedActivationKernel | None:
    from atom_core.kernels.fp8_gated_activation.aiter_kernel import build  # looked for when it is chosen

    return build(spec.activation, spec.size, spec.form)


#: "separate" is no kernel: the layers run each op by itself.
FP8_GATED_ACTIVATION: Op[Fp8GatedActivationSpec, Fp8GatedActivationKernel | None] = Op(
    "fp8_gated_activation",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
