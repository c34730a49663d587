"""Quantise activations to FP8 with one scale or a scale per row, together with the op before: a norm, a residual's
addition and a norm, or a gated activation. Values are rounded to the model's dtype as if the ops were separate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS, gated
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import launch_options, next_power_of_2
from atom_core.types import Activation


def unit_of(dtype: torch.dtype) -> float:
    """The e4m3fn value of the bits that mean 1 in a variant of e4m3."""
    return 2.0 if dtype == FNUZ else 1.0


def scale_factor(dtype: torch.dtype, as_values: bool) -> float:
    """What quantisers multiply a scale by, which is that of e4m3fn values.

    ``as_values``: a stored value times its scale is the number, as in
    :class:`atom_core.kernels.fp8_inputs.QuantizedInput`. Else the scale is for a product of e4m3fn's bits: in
    e4m3fnuz the bits of both operands mean half of their e4m3fn values.
    """
    return unit_of(dtype) if as_values else unit_of(dtype) ** 2


@triton.jit
def norm_factor(numbers, K, eps):
    """The factor of an RMS norm over ``K`` numbers, without its weight."""
    return 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / K + eps)


@triton.jit
def scale_of(numbers, given, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """The scale of a row: the given one, or its largest magnitude over e4m3's."""
    if given is None:
        return tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), 0), SMALLEST), LIMIT)
    else:  # noqa: RET505 - a compile-time branch: code after a return would be compiled in either case
        return tl.load(given)


@triton.jit
def narrowed(numbers, inverse, LIMIT: tl.constexpr, UNIT: tl.constexpr, dtype: tl.constexpr):
    """``numbers * inverse`` in a variant of e4m3, clamped to its range.

    ``UNIT``: see :func:`unit_of`; ``inverse``: 1 / (``UNIT`` * scale).
    """
    limit: tl.constexpr = LIMIT / UNIT
    numbers *= inverse
    # Comparisons let NaN through, which min and max may not.
    return tl.where(numbers > limit, limit, tl.where(numbers < -limit, -limit, numbers)).to(dtype)


@triton.jit
def store_groups(
    numbers,
    quantized,
    scales,
    row,
    first,
    stride_scales,
    K,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Quantise ``GROUPS`` whole groups of a row, from the group ``first`` on, and store those that the row has.

    ``numbers``: ``[GROUPS * GROUP]`` in float32. ``quantized``: ``[T, K]``; ``scales``: a group's are together.
    ``UNIT``: see :func:`unit_of`; ``FACTOR``: see :func:`scale_factor`.
    """
    grouped = tl.reshape(numbers, (GROUPS, GROUP))
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 1), SMALLEST), LIMIT)
    group = first + tl.arange(0, GROUPS)
    scale_at = scales + group.to(tl.int64) * stride_scales + row
    tl.store(scale_at, scale * FACTOR, mask=group * GROUP < K, eviction_policy=EVICT_LAST)
    inverse = tl.div_rn(1.0, scale * UNIT)
    stored = tl.reshape(narrowed(grouped, inverse[:, None], LIMIT, UNIT, quantized.dtype.element_ty), numbers.shape)
    column = first * GROUP + tl.arange(0, GROUPS * GROUP)
    tl.store(quantized + row * K + column, stored, mask=column < K, eviction_policy=EVICT_LAST)


@triton.jit
def made(
    x,
    residual,
    norm,
    factors,
    row,
    column,
    known,
    eps,
    stride_x,
    stride_residual,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """The values of a row to quantise, in float32; see :class:`Made`; ``factors`` is the norm's weight."""
    dtype: tl.constexpr = x.dtype.element_ty
    at = x + row * stride_x + column
    numbers = tl.load(at, mask=known, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(at + K, mask=known, other=0.0).to(tl.float32)
        numbers = gated(numbers, up, ACTIVATION).to(dtype).to(tl.float32)
    if residual is not None:
        stream = residual + row * stride_residual + column
        numbers = (numbers + tl.load(stream, mask=known, other=0.0).to(tl.float32)).to(dtype)
        tl.store(stream, numbers, mask=known, eviction_policy=EVICT_LAST)
        numbers = numbers.to(tl.float32)
    if norm is not None:
        numbers = (numbers * norm_factor(numbers, K, eps) * factors).to(dtype).to(tl.float32)
    return numbers


@entry_kernel
@triton.jit
def _quantize(
    x,
    residual,
    norm,
    given,
    quantized,
    scales,
    eps,
    stride_x,
    stride_residual,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row; see :func:`unit_of` and :func:`scale_factor`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    known = column < K
    factors = 1.0
    if norm is not None:
        factors = tl.load(norm + column, mask=known, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    numbers = made(x, residual, norm, factors, row, column, known, eps, stride_x, stride_residual, K, ACTIVATION)
    scale = scale_of(numbers, given, LIMIT, SMALLEST)
    tl.store(scales + row, scale * FACTOR, eviction_policy=EVICT_LAST)
    inverse = tl.div_rn(1.0, scale * UNIT)
    tl.store(
        quantized + row * K + column,
        narrowed(numbers, inverse, LIMIT, UNIT, quantized.dtype.element_ty),
        mask=known,
        eviction_policy=EVICT_LAST,
    )


class Made(NamedTuple):
    """The ops before the quantisation of ``x``."""

    norm: Norm | None = None
    """An RMS norm, the last op."""
    residual: torch.Tensor | None = None
    """``[T, K]``, written to: ``x`` is added to it, and the sum goes on."""
    activation: Activation | None = None
    """A gated activation of ``x [T, 2K]``, ``[gate | up]``."""

    def arguments(self) -> dict[str, object]:
        """Keyword arguments of a kernel."""
        norm, residual, activation = self
        assert residual is None or residual.stride(1) == 1
        return {
            "norm": None if norm is None else norm.weight,
            "eps": 0.0 if norm is None else norm.eps,
            "residual": residual,
            "stride_residual": 0 if residual is None else residual.stride(0),
            "ACTIVATION": None if activation is None else ACTIVATIONS[activation],
        }

    def size(self, x: torch.Tensor) -> int:
        """Elements of a row after the ops."""
        return x.shape[1] if self.activation is None else x.shape[1] // 2


AS_IT_IS = Made()


def quantize(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    dtype: torch.dtype,
    overlap: bool,
    of: Made = AS_IT_IS,
    *,
    as_values: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``of(x) [T, K]`` in ``dtype``, and float32 scales ``[T, 1]``; ``as_values``: see :func:`scale_factor`."""
    num_rows, size = len(x), of.size(x)
    assert x.stride(1) == 1
    quantized = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        block = next_power_of_2(size)
        _quantize[(num_rows,)](
            x=x,
            given=input_scale,
            quantized=quantized,
            scales=scales,
            stride_x=x.stride(0),
            K=size,
            UNIT=unit_of(dtype),
            FACTOR=scale_factor(dtype, as_values),
            LIMIT=LIMIT,
            SMALLEST=SMALLEST,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)),
            **of.arguments(),
            **launch_options(overlap),
        )
    return quantized, scales
