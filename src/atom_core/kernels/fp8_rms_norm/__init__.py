"""Root mean square norm, with the residual added first where there is one, quantised for the FP8 product behind it.

    x = x + residual                     (where a residual is given; it is also returned)
    y = rms_norm(x) in FP8, with its scales

as :mod:`atom_core.kernels.rms_norm`, and :mod:`atom_core.kernels.fp8_linear` or
:mod:`atom_core.kernels.fp8_block_linear`, define them, but nothing is rounded to 16 bits on the way: neither the sum
that is normed nor the norm that is quantised.
``x``, ``residual``: ``[T, K]`` of one dtype; the weight: ``[K]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.aiter_library import why_no_aiter, why_not_fused
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.select import Implementation, Op, Target, always


@dataclass(frozen=True)
class Fp8RmsNormSpec:
    """One norm: its width and dtype, and what the product behind it takes.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is what was chosen.
    """

    size: int
    dtype: torch.dtype
    form: InputForm
    separate: tuple[tuple[str, str], ...]


class Fp8RmsNormKernel(Protocol):
    """The call: ``(x, weight, eps, residual)`` to the product's input and the new residual; inputs are left alone.

    Without a residual the second result is None.
    """

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[QuantizedInput, torch.Tensor | None]: ...


def _aiter_supports(spec: Fp8RmsNormSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target) or why_not_fused(spec.separate):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's norm is for numbers of two bytes, not for {spec.dtype}."
    if spec.size > 8192:
        return f"aiter's norm that quantises takes rows of up to 8192 numbers, not of {spec.size}."
    if spec.form.group is not None and spec.size % spec.form.group:
        return f"aiter's norm that quantises takes whole groups of {spec.form.group} numbers, not rows of {spec.size}."
    return None


def _build_aiter(spec: Fp8RmsNormSpec, target: Target) -> Fp8RmsNormKernel | None:
    from atom_core.kernels.fp8_rms_norm.aiter_kernel import AiterFp8RmsNorm  # looked for when it is chosen

    return AiterFp8RmsNorm(spec.form)


#: "separate" is no kernel: the layers run each op by itself.
FP8_RMS_NORM: Op[Fp8RmsNormSpec, Fp8RmsNormKernel | None] = Op(
    "fp8_rms_norm",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
