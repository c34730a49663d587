"""RMS norm, optionally after the addition of a residual, quantised for the FP8 product after it.

    x = x + residual                     (where a residual is given; it is also returned)
    y = rms_norm(x) in FP8, with its scales

as :mod:`atom_core.kernels.rms_norm`, and :mod:`atom_core.kernels.fp8_linear` or
:mod:`atom_core.kernels.fp8_block_linear`, define them. A kernel may round the norm's input and result to the dtype of
``x``, as separate ops do, or not, as aiter does. ``x``, ``residual``: ``[T, K]`` of one dtype; the weight: ``[K]`` in
that dtype or float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.aiter_library import why_no_aiter, why_not_fused
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.kernels.triton_support import why_not_fused as why_not_fused_by_triton

#: Largest row that a Triton program has in registers.
MAX_SIZE = 16384


@dataclass(frozen=True)
class Fp8RmsNormSpec:
    """One norm: its width and dtype, and the input form of the next product.

    ``separate``: the implementation chosen for each separate op; only the same implementation is fused.
    """

    size: int
    dtype: torch.dtype
    form: InputForm
    separate: tuple[tuple[str, str], ...]


class Fp8RmsNormKernel(Protocol):
    """Computes the product's input and the new residual, or None without one.

    ``x`` is not modified; ``residual`` may be written to, and is then returned.
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
    from atom_core.kernels.fp8_rms_norm.aiter_kernel import AiterFp8RmsNorm  # imported only when chosen

    return AiterFp8RmsNorm(spec.form)


def _triton_supports(spec: Fp8RmsNormSpec, target: Target) -> str | None:
    if reason := why_no_triton(target) or why_not_fused_by_triton(spec.separate):
        return reason
    if spec.size > MAX_SIZE:
        return f"Triton's norm that quantises is used for rows of up to {MAX_SIZE} numbers, not of {spec.size}."
    return None


def _build_triton(spec: Fp8RmsNormSpec, target: Target) -> Fp8RmsNormKernel | None:
    from atom_core.kernels.fp8_rms_norm.triton_kernel import TritonFp8RmsNorm  # needs triton, which a CPU may lack

    return TritonFp8RmsNorm(spec.form, overlaps(target))


#: "separate" is not a kernel: the layers run the separate ops.
FP8_RMS_NORM: Op[Fp8RmsNormSpec, Fp8RmsNormKernel | None] = Op(
    "fp8_rms_norm",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
