"""Products with FP8 weights in blocks on a GPU.

One row on NVIDIA's GPUs is not quantised, and one launch (:mod:`atom_core.kernels.fp8_linear.one_row`). Else the input
is quantised in a launch of its own, with the norm in front where there is one; up to 64 rows are multiplied by
:mod:`.few_rows`, on Hopper where the input is whole blocks by :mod:`.few_rows_hopper`, more, which a norm or an
activation in front may have quantised, by :mod:`.many_rows`, or on Hopper by :mod:`.cublas`.
"""

from __future__ import annotations

import torch

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_block_linear import cublas
from atom_core.kernels.fp8_block_linear.few_rows import multiply_few_rows
from atom_core.kernels.fp8_block_linear.many_rows import multiply_many_rows
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.one_row import multiply_row, tile_for, why_not_one_row
from atom_core.kernels.fp8_linear.quantize import Made
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.select import Target
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.types import Activation


class TritonFp8BlockLinear:
    """See the module's text.

    Args:
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        dtype: of results where the input is given quantised; None: it is not.
    """

    max_rows = MAX_ROWS

    def __init__(self, target: Target, overlap: bool, dtype: torch.dtype | None = None) -> None:
        self.nvidia, self.overlap, self.dtype = target.kind == "cuda", overlap, dtype
        self.fnuz = dtype_of(target) == FNUZ
        # In e4m3fnuz factors have the scales' two twos in them, which others know nothing of.
        self.form = None if self.fnuz or dtype is None else InputForm(E4M3, group=BLOCK_SIZE)

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Mend what the device would read otherwise."""
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
        """More rows than it quantises together with the norm in front; tracing would freeze how many there are.

        Rows that cuBLAS reads no scales of are quantised with those that they lack.
        """
        return not torch.compiler.is_compiling() and rows > MAX_ROWS and rows % cublas.TOGETHER == 0

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`."""
        assert self.dtype is not None
        return multiply_many(x.values, x.scales, weight, weight_scale, bias, nvidia=self.nvidia, dtype=self.dtype)


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
    """``x W^T + b``; the weight is in the device's form of e4m3, its scales are those of e4m3fn."""
    if 0 < len(x) <= MAX_ROWS:
        return multiply_few(x, weight, weight_scale, bias, nvidia=nvidia, overlap=overlap)
    if not len(x):
        return x.new_empty(0, len(weight))
    multiple = cublas.TOGETHER if cublas.takes(weight, x.dtype) else 1
    quantized, scales = quantize_groups(x, weight.dtype, overlap, group=BLOCK_SIZE, multiple=multiple)
    return multiply_many(quantized, scales, weight, weight_scale, bias, nvidia=nvidia, dtype=x.dtype)[: len(x)]


def multiply_many(
    x: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x W^T + b`` in ``dtype``, of what :func:`quantize_groups` returns; for cuBLAS rows are whole multiples."""
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
    """``act(norm(x) W^T + b) + residual``, of 1 to :data:`MAX_ROWS` rows of the model's dtype."""
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
