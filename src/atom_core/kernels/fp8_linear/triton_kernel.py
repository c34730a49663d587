"""Products with FP8 weights on a GPU: the input is quantised in one launch, with the norm in front where there is one.

Up to 64 rows are multiplied by the kernel of :mod:`atom_core.kernels.linear`, more by torch. Both multiply FP8 by FP8:
an H200 widens FP8 to 16 bits no faster than at half the speed of its memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of, multiply
from atom_core.kernels.linear.triton_kernel import MAX_FP8_ROWS, Norm, chosen_tile, product
from atom_core.kernels.opaque import opaque
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import launch_options


@triton.jit
def _quantize(
    x,
    norm,
    given,
    quantized,
    scales,
    eps,
    stride_x,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row. ``UNIT``: what the output dtype's 1 is in e4m3fn's."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    known = column < K
    if norm is not None:
        factors = tl.load(norm + column, mask=known, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    numbers = tl.load(x + row * stride_x + column, mask=known, other=0.0).to(tl.float32)
    if norm is not None:
        numbers *= 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / K + eps)
        # rounded between the two, as the model defines them
        numbers = (numbers * factors).to(x.dtype.element_ty).to(tl.float32)
    if given is None:  # noqa: SIM108 - decided when compiling
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), 0), SMALLEST), LIMIT)
    else:
        scale = tl.load(given)
    tl.store(scales + row, scale * (UNIT * UNIT))
    limit: tl.constexpr = LIMIT / UNIT
    numbers = tl.div_rn(numbers, tl.full([BLOCK], 0.0, tl.float32) + scale * UNIT)
    # Comparisons let NaN through, which min and max may not.
    numbers = tl.where(numbers > limit, limit, tl.where(numbers < -limit, -limit, numbers))
    tl.store(quantized + row * K + column, numbers.to(quantized.dtype.element_ty), mask=known)


def quantize(
    x: torch.Tensor, input_scale: torch.Tensor | None, dtype: torch.dtype, overlap: bool, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(x) [T, K]`` in ``dtype``, and float32 ``[T, 1]``, which goes with a product of e4m3fn's bits.

    In e4m3fnuz the bits of both sides are half of what they are in e4m3fn, so that factor has two times two in it.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    quantized = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _quantize[(num_rows,)](
            x,
            None if norm is None else norm.weight,
            input_scale,
            quantized,
            scales,
            0.0 if norm is None else norm.eps,
            x.stride(0),
            K=size,
            UNIT=2.0 if dtype == FNUZ else 1.0,
            LIMIT=LIMIT,
            SMALLEST=SMALLEST,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(overlap),
        )
    return quantized, scales


class TritonFp8Linear:
    """See the module's text.

    Args:
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    max_rows = MAX_FP8_ROWS

    def __init__(self, target: Target, overlap: bool) -> None:
        self.nvidia, self.overlap = target.kind == "cuda", overlap
        self.fnuz = dtype_of(target) == FNUZ

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Mend what the device would read otherwise."""
        if self.fnuz:
            clear_minus_zeros(weight)

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_linear.FewRowsFp8Kernel`."""
        return weight.view(FNUZ) if self.fnuz else weight

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_linear.FewRowsFp8Kernel`."""
        weight = self.stored(weight)
        quantized, scales = quantize(x, input_scale, weight.dtype, self.overlap)
        return _few_rows(quantized, scales, weight, weight_scale, bias, x.dtype, self.nvidia, self.overlap, residual)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        return fp8_linear(x, self.stored(weight), weight_scale, input_scale, bias, self.nvidia, self.overlap)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@opaque("fp8_linear", _fake)
def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """``x (weight_scale * weight)^T + b``; the weight is in the device's form of e4m3, the scale that of e4m3fn."""
    quantized, scales = quantize(x, input_scale, weight.dtype, overlap)
    if not 0 < x.shape[0] <= MAX_FP8_ROWS:
        return multiply(quantized, scales, weight, weight_scale, bias, x.dtype)
    return _few_rows(quantized, scales, weight, weight_scale, bias, x.dtype, nvidia, overlap)


def _few_rows(
    quantized: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    return product(
        quantized,
        weight,
        bias,
        tile=chosen_tile(quantized, weight, nvidia),
        overlap=overlap,
        scales=weight_scale,
        input_scales=input_scales,
        residual=residual,
        dtype=dtype,
    )
