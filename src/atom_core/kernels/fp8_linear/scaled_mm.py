"""The product by torch's own FP8 product: cuBLASLt or CUTLASS on NVIDIA, hipBLASLt on AMD.

gfx942 multiplies only e4m3fnuz, in which the same bits mean half and minus zero is NaN. So weights keep their bits,
except that minus zeros become zeros, and both scales are doubled.
"""

from __future__ import annotations

import torch

from atom_core.kernels.fp8_linear.reference import E4M3, quantize_input
from atom_core.kernels.select import Target

FNUZ = torch.float8_e4m3fnuz
_MINUS_ZERO = 0x80
#: FP8 matrices have sizes that are multiples of this.
MULTIPLE = 16


def why_no_fp8(target: Target) -> str | None:
    """None where the GPU ``target`` multiplies FP8, else the reason."""
    if target.kind == "cuda" and int(target.arch.removeprefix("sm")) < 89:
        return f"NVIDIA's GPUs multiply FP8 from sm89 on, not on {target.arch}."
    if target.kind == "rocm" and target.arch not in ("gfx942", "gfx950"):
        return f"AMD's GPUs multiply FP8 on gfx942 and gfx950, not on {target.arch}."
    return None


def why_no_scaled_mm(in_features: int, out_features: int, target: Target) -> str | None:
    """None where torch multiplies FP8 matrices of these sizes on ``target``, else the reason."""
    if target.kind == "cpu":
        return "torch's FP8 product of scaled matrices is for GPUs."
    if reason := why_no_fp8(target):
        return reason
    if in_features % MULTIPLE or out_features % MULTIPLE:
        return (
            f"torch's FP8 product wants inputs and outputs in multiples of {MULTIPLE}, "
            f"not {in_features} and {out_features}."
        )
    return None


def dtype_of(target: Target) -> torch.dtype:
    """The variant of e4m3 that ``target`` multiplies."""
    return FNUZ if target.arch == "gfx942" else E4M3


def clear_minus_zeros(weight: torch.Tensor) -> None:
    """Set minus zeros to zero, in place: equal in e4m3fn, but minus zero is NaN in e4m3fnuz."""
    stored = weight.view(torch.uint8)
    stored.masked_fill_(stored == _MINUS_ZERO, 0)


def multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``(x_scale * x) (weight_scale * weight)^T + bias`` in ``dtype``.

    Args:
        x: FP8 ``[T, K]``.
        x_scale: float32 ``[T, 1]``.
        weight: FP8 ``[N, K]``.
        weight_scale: float32 ``[N]``.
        bias: ``[N]`` in ``dtype``.
        dtype: of the result.
    """
    if not len(x):
        return torch.empty(0, len(weight), dtype=dtype, device=x.device)
    right = weight.t()
    # NVIDIA's tensor cores then sum a few products with less than float32, much faster; frameworks do the same.
    fast = torch.version.hip is None
    if dtype == torch.bfloat16:
        y = torch._scaled_mm(x, right, x_scale, weight_scale[None, :], out_dtype=dtype, use_fast_accum=fast)
        # cuBLAS does not support row scales with a bias for every shape.
        return y if bias is None else y.add_(bias)
    # With row scales torch supports only bfloat16 results.
    one = torch.ones((), dtype=torch.float32, device=x.device)
    y = torch._scaled_mm(x, right, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    y = y * x_scale * weight_scale
    if bias is not None:
        y += bias
    return y.to(dtype)


class ScaledMm:
    """See :mod:`atom_core.kernels.fp8_linear`; torch ops quantise the input."""

    def __init__(self, target: Target) -> None:
        self.dtype = dtype_of(target)

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Clear minus zeros, which are NaN in e4m3fnuz."""
        if self.dtype == FNUZ:
            clear_minus_zeros(weight)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        quantized, scale = quantize_input(x, input_scale)
        if self.dtype == FNUZ:
            # 4: both scales are doubled
            clear_minus_zeros(quantized)
            quantized, weight, scale = quantized.view(FNUZ), weight.view(FNUZ), 4.0 * scale
        return multiply(quantized, scale.expand(x.shape[0], 1).contiguous(), weight, weight_scale, bias, x.dtype)
