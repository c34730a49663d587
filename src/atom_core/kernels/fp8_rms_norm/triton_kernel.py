"""An RMS norm that quantises in Triton, in one launch with the residual's addition and the results of three."""

from __future__ import annotations

import torch

from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.quantize import Made, quantize
from atom_core.kernels.linear.triton_kernel import Norm


class TritonFp8RmsNorm:
    """See :class:`atom_core.kernels.fp8_rms_norm.Fp8RmsNormKernel`; the sum with the residual is rounded.

    ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, form: InputForm, overlap: bool) -> None:
        self.form, self.overlap = form, overlap

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[QuantizedInput, torch.Tensor | None]:
        """Rows of ``x`` and ``residual`` may have gaps between them; ``residual`` is written to, and returned."""
        made = Made(Norm(weight, eps), residual)
        return quantized(x, self.form, self.overlap, made), residual


def quantized(x: torch.Tensor, form: InputForm, overlap: bool, of: Made) -> QuantizedInput:
    """``of(x)`` quantised in ``form``."""
    if form.group is None:
        return QuantizedInput(*quantize(x, None, form.dtype, overlap, of, as_values=True))
    return QuantizedInput(*quantize_groups(x, form.dtype, overlap, group=form.group, of=of, as_values=True))
