"""Products with FP8 weights on a GPU.

On NVIDIA's GPUs one row takes one launch and is not quantised (:mod:`.one_row`). Otherwise one launch quantises the
input and applies the norm before it. :mod:`atom_core.kernels.linear` multiplies up to 64 rows and torch more; a fused
norm or activation may have quantised those already.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.one_row import multiply_row, tile_for
from atom_core.kernels.fp8_linear.quantize import Made, quantize
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of, multiply
from atom_core.kernels.linear.tiles import MAX_ROWS, chosen_tile, tile_key
from atom_core.kernels.linear.triton_kernel import Norm, product
from atom_core.kernels.select import Target
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.kernels.fp8_linear import Fp8LinearSpec


class TritonFp8Linear:
    """See the module.

    Args:
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        dtype: of results of quantised inputs; None: inputs are never quantised.
        spec: the product, for :meth:`compile_keys`.
    """

    max_rows = MAX_ROWS

    def __init__(
        self, target: Target, overlap: bool, dtype: torch.dtype | None = None, spec: Fp8LinearSpec | None = None
    ) -> None:
        self.nvidia, self.overlap, self.dtype, self.spec = target.kind == "cuda", overlap, dtype, spec
        self.fnuz = dtype_of(target) == FNUZ
        # For e4m3fnuz the scales need a factor of four, which other kernels do not apply.
        self.form = None if self.fnuz or dtype is None else InputForm(E4M3, group=None)

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        spec, num_rows = self.spec, shape.num_tokens
        assert spec is not None
        if num_rows > MAX_ROWS:
            yield "torch"
        elif num_rows == 1 and self.nvidia:
            yield "row"
        else:
            dtype = FNUZ if self.fnuz else E4M3
            yield tile_key(num_rows, spec.out_features, spec.in_features, dtype, self.nvidia, device)

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Clear minus zeros, which are NaN in e4m3fnuz."""
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
        return multiply_few(
            x, weight, weight_scale, input_scale, bias, nvidia=self.nvidia, overlap=self.overlap, residual=residual
        )

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

    def takes_quantized(self, rows: int) -> bool:
        """Whether ``rows`` exceed those that a norm here quantises; False while tracing, which fixes ``rows``."""
        return not torch.compiler.is_compiling() and rows > MAX_ROWS

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`."""
        assert self.dtype is not None
        return multiply(x.values, x.scales, weight, weight_scale, bias, self.dtype)


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


@custom_op("fp8_linear", _fake)
def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """``x (weight_scale * weight)^T + b``; the weight is in the device's variant of e4m3, the scale for e4m3fn."""
    if 0 < x.shape[0] <= MAX_ROWS:
        return multiply_few(x, weight, weight_scale, input_scale, bias, nvidia=nvidia, overlap=overlap)
    quantized, scales = quantize(x, input_scale, weight.dtype, overlap)
    return multiply(quantized, scales, weight, weight_scale, bias, x.dtype)


def multiply_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) (weight_scale W)^T + b) + residual`` for 1 to :data:`MAX_ROWS` rows.

    As :func:`atom_core.kernels.fp8_linear.one_row.multiply_row`; a separate launch quantises several rows, with
    ``input_scale`` where it is static.
    """
    if nvidia and len(x) == 1:
        return multiply_row(
            x,
            weight,
            weight_scale,
            bias,
            tile=tile_for(*weight.shape),
            native=True,
            overlap=overlap,
            norm=norm,
            activation=activation,
            residual=residual,
        )
    quantized, scales = quantize(x, input_scale, weight.dtype, overlap, Made(norm))
    tile = chosen_tile(quantized, weight, nvidia)
    assert tile is not None, "every product of few rows in FP8 is ours"
    return product(
        quantized,
        weight,
        bias,
        tile=tile,
        overlap=overlap,
        scales=weight_scale,
        input_scales=scales,
        activation=activation,
        residual=residual,
        dtype=x.dtype,
    )
