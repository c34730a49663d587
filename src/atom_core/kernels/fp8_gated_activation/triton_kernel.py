"""A gated activation that quantises in Triton, in one launch with the results of two."""

from __future__ import annotations

import torch

from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.quantize import Made
from atom_core.kernels.fp8_rms_norm.triton_kernel import quantized
from atom_core.types import Activation


class TritonFp8GatedActivation:
    """See :mod:`atom_core.kernels.fp8_gated_activation`.

    ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, activation: Activation, form: InputForm, overlap: bool) -> None:
        self.form, self.overlap, self.made = form, overlap, Made(activation=activation)

    def __call__(self, x: torch.Tensor) -> QuantizedInput:
        """``x [T, 2K]`` to ``[T, K]``."""
        return quantized(x, self.form, self.overlap, self.made)
