"""Products with FP8 weights on a GPU, by how many rows there are.

Up to 16 rows: the kernels of :mod:`atom_core.kernels.linear`, which widen the weight's tiles in registers and leave the
input as it is, so they read half the bytes. More rows: the input is quantised in one launch, and torch multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of, multiply
from atom_core.kernels.linear.triton_kernel import MAX_ROWS, chosen_tile, product
from atom_core.kernels.opaque import opaque
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import launch_options


@triton.jit
def _quantize(
    x,
    given,
    quantized,
    scales,
    K,
    stride_x,
    UNIT: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row. ``UNIT``: what the output dtype's 1 is in e4m3fn's."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = x + row * stride_x + column
    if given is None:
        largest = tl.zeros([BLOCK], tl.float32)
        for begin in tl.range(0, K, BLOCK):
            numbers = tl.load(at + begin, mask=begin + column < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(numbers))
        scale = tl.div_rn(tl.maximum(tl.max(largest, 0), SMALLEST), LIMIT)
    else:
        scale = tl.load(given)
    tl.store(scales + row, scale * (UNIT * UNIT))
    limit: tl.constexpr = LIMIT / UNIT
    for begin in tl.range(0, K, BLOCK):
        known = begin + column < K
        numbers = tl.load(at + begin, mask=known, other=0.0).to(tl.float32)
        numbers = tl.div_rn(numbers, tl.full([BLOCK], 0.0, tl.float32) + scale * UNIT)
        # Comparisons let NaN through, which min and max may not.
        numbers = tl.where(numbers > limit, limit, tl.where(numbers < -limit, -limit, numbers))
        tl.store(quantized + row * K + begin + column, numbers.to(quantized.dtype.element_ty), mask=known)


def quantize(
    x: torch.Tensor, input_scale: torch.Tensor | None, dtype: torch.dtype, overlap: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, K]`` in ``dtype``, and float32 ``[T, 1]``: what a product with e4m3fn's bits is to be multiplied by.

    In e4m3fnuz the bits of both sides are half of what they are in e4m3fn, so that factor has two times two in it.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    quantized = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        block = min(4096, triton.next_power_of_2(size))
        _quantize[(num_rows,)](
            x,
            input_scale,
            quantized,
            scales,
            size,
            x.stride(0),
            UNIT=2.0 if dtype == FNUZ else 1.0,
            LIMIT=LIMIT,
            SMALLEST=SMALLEST,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=min(8, max(1, block // 512)),
            **launch_options(overlap),
        )
    return quantized, scales


class TritonFp8Linear:
    """See the module's text.

    Args:
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    max_rows = MAX_ROWS

    def __init__(self, target: Target, overlap: bool) -> None:
        self.nvidia, self.overlap = target.kind == "cuda", overlap
        self.fnuz = dtype_of(target) == FNUZ
        self._doubled: torch.Tensor | None = None

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Mend what the device would read otherwise."""
        if self.fnuz:
            clear_minus_zeros(weight)
            # In place where it is done again: a graph may have the address.
            self._doubled = torch.empty_like(weight_scale) if self._doubled is None else self._doubled
            torch.mul(weight_scale, 2.0, out=self._doubled)

    def few_rows(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.fp8_linear.FewRowsFp8Kernel`."""
        return (weight, weight_scale) if self._doubled is None else (weight.view(FNUZ), self._doubled)

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_linear.FewRowsFp8Kernel`."""
        weight, scales = self.few_rows(weight, weight_scale)
        tile = chosen_tile(x, weight, self.nvidia)
        return product(x, weight, bias, tile=tile, overlap=self.overlap, scales=scales, residual=residual)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        return fp8_linear(x, weight, weight_scale, self._doubled, input_scale, bias, self.nvidia, self.overlap)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    doubled_scale: torch.Tensor | None,
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
    doubled_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """``x (weight_scale * weight)^T + b``; ``doubled_scale`` is ``2 * weight_scale`` where the device has e4m3fnuz."""
    num_rows = x.shape[0]
    if doubled_scale is not None:
        weight = weight.view(FNUZ)
    if num_rows == 0:
        return x.new_empty(0, weight.shape[0])
    if num_rows > MAX_ROWS:
        quantized, scales = quantize(x, input_scale, weight.dtype, overlap)
        return multiply(quantized, scales, weight, weight_scale, bias, x.dtype)
    few = weight_scale if doubled_scale is None else doubled_scale
    tile = chosen_tile(x, weight, nvidia)
    return product(x, weight, bias, tile=tile, overlap=overlap, scales=few)
