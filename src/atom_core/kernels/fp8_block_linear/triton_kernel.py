"""Products with FP8 weights in blocks on a GPU.

On NVIDIA's GPUs one row takes one launch and is not quantised (:mod:`atom_core.kernels.fp8_linear.one_row`). Otherwise
one launch quantises the input and applies the norm before it. :mod:`.few_rows` multiplies up to 64 rows, on Hopper and
whole blocks :mod:`.few_rows_hopper` or :mod:`.specialized_hopper`, and the latter up to 256 by small weights.
:mod:`.many_rows`, or on Hopper :mod:`.cublas`, multiplies more; a fused norm or activation may have quantised those
already, and a norm with a small product beside this one 2 to 16 rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_block_linear import cublas
from atom_core.kernels.fp8_block_linear.few_rows import multiply_few_rows, takes_more
from atom_core.kernels.fp8_block_linear.hopper_tiles import MOST_ROWS, input_rows
from atom_core.kernels.fp8_block_linear.many_rows import multiply_many_rows
from atom_core.kernels.fp8_block_linear.many_rows import tile_for as tile_for_many
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.one_row import multiply_row, tile_for, why_not_one_row
from atom_core.kernels.fp8_linear.quantize import Made
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of
from atom_core.kernels.linear.tiles import MAX_ROWS, on_hopper
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import cdiv
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.types import Activation


class TritonFp8BlockLinear:
    """See the module.

    Args:
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        dtype: of results of quantised inputs; None: inputs are never quantised.
    """

    max_rows = MAX_ROWS

    def __init__(self, target: Target, overlap: bool, dtype: torch.dtype | None = None) -> None:
        self.nvidia, self.overlap, self.dtype = target.kind == "cuda", overlap, dtype
        self.fnuz = dtype_of(target) == FNUZ
        # For e4m3fnuz the scales need a factor of four, which other kernels do not apply.
        self.form = None if self.fnuz or dtype is None else InputForm(E4M3, group=BLOCK_SIZE)

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        num_rows = shape.num_tokens
        if num_rows <= MAX_ROWS:
            yield num_rows == 1, max(8 if on_hopper(device) else 16, input_rows(num_rows))
        else:
            # Whole multiples may come quantised by a norm or an activation in front.
            yield num_rows % cublas.TOGETHER == 0
            if num_rows <= MOST_ROWS and on_hopper(device):
                yield "few", cdiv(num_rows, 32)
            yield tile_for_many(num_rows, True, self.nvidia)

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Clear minus zeros, which are NaN in e4m3fnuz."""
        if self.fnuz:
            clear_minus_zeros(weight)

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_block_linear.FewRowsFp8BlockKernel`."""
        return weight.view(FNUZ) if self.fnuz else weight

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_block_linear.FewRowsFp8BlockKernel`."""
        weight = self.stored(weight)
        return multiply_few(x, weight, weight_scale, bias, nvidia=self.nvidia, overlap=self.overlap, residual=residual)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        return fp8_block_linear(x, self.stored(weight), weight_scale, bias, self.nvidia, self.overlap)

    def takes_quantized(self, rows: int) -> bool:
        """Whether ``rows`` exceed those that a norm here quantises; False while tracing, which fixes ``rows``.

        False also where cuBLAS needs padded rows, which :func:`fp8_block_linear` quantises with their padding.
        """
        return not torch.compiler.is_compiling() and rows > MAX_ROWS and rows % cublas.TOGETHER == 0

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`."""
        assert self.dtype is not None
        if len(x.values) <= MAX_ROWS:
            return multiply_few_rows(
                *x, weight, weight_scale, bias, nvidia=self.nvidia, overlap=self.overlap, dtype=self.dtype
            )
        return multiply_many(*x, weight, weight_scale, bias, nvidia=self.nvidia, overlap=self.overlap, dtype=self.dtype)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@custom_op("fp8_block_linear", _fake)
def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """``x W^T + b``; the weight is in the device's variant of e4m3, its scales are for e4m3fn."""
    if 0 < len(x) <= MAX_ROWS:
        return multiply_few(x, weight, weight_scale, bias, nvidia=nvidia, overlap=overlap)
    if not len(x):
        return x.new_empty(0, len(weight))
    multiple = cublas.TOGETHER if cublas.takes(weight, x.dtype) else 1
    quantized, scales = quantize_groups(x, weight.dtype, overlap, group=BLOCK_SIZE, multiple=multiple)
    given = quantized, scales, weight, weight_scale, bias
    return multiply_many(*given, nvidia=nvidia, overlap=overlap, dtype=x.dtype)[: len(x)]


def multiply_many(
    x: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    overlap: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x W^T + b`` in ``dtype``, from the results of :func:`quantize_groups`, which are padded for cuBLAS."""
    if takes_more(len(x), weight):
        return multiply_few_rows(x, scales, weight, weight_scale, bias, nvidia=nvidia, overlap=overlap, dtype=dtype)
    if cublas.takes(weight, dtype):
        return cublas.multiply(x, scales, weight, weight_scale, bias)
    return multiply_many_rows(x, scales, weight, weight_scale, bias, nvidia=nvidia, dtype=dtype)


def multiply_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) W^T + b) + residual`` for 1 to :data:`MAX_ROWS` rows of the model's dtype."""
    tile = tile_for(*weight.shape)
    if nvidia and len(x) == 1 and why_not_one_row(x, len(weight), tile, activation, BLOCK_SIZE) is None:
        return multiply_row(
            x,
            weight,
            weight_scale,
            bias,
            tile=tile,
            block=BLOCK_SIZE,
            native=True,
            overlap=overlap,
            norm=norm,
            activation=activation,
            residual=residual,
        )
    quantized, scales = quantize_groups(x, weight.dtype, overlap, group=BLOCK_SIZE, of=Made(norm))
    return multiply_few_rows(
        quantized,
        scales,
        weight,
        weight_scale,
        bias,
        nvidia=nvidia,
        overlap=overlap,
        dtype=x.dtype,
        activation=activation,
        residual=residual,
    )
