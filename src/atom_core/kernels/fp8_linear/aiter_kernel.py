"""The product by aiter: its quantisation kernel, then a product with a preshuffled weight.

gfx942 multiplies e4m3fnuz, in which the same bits mean half of their e4m3fn value: weights keep their bits, except that
minus zeros become zeros, and their scales are doubled. A static scale is doubled too, so that activations are clamped
at e4m3fn's limit or slightly above (480 instead of 448). aiter's quantisation turns NaN into the most negative value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import FP8, LooksUpTokens, aiter_function, require
from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros
from atom_core.kernels.moved import move_back
from atom_core.kernels.select import Target

if TYPE_CHECKING:
    from atom_core.kernels.fp8_linear import Fp8LinearSpec


class ShuffledWeight:
    """A layer's preshuffled weight, and its scales in the form that the device multiplies.

    The layer has the weight, which is reordered in place. The scales are stored here, because new weights load the
    layer's again. Both keep their addresses, which CUDA graphs have captured.
    """

    def __init__(self, target: Target) -> None:
        require("aiter.ops.shuffle.shuffle_weight")
        self.dtype = FP8[target.arch]
        self.scale: torch.Tensor | None = None

    def adopt(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Preshuffle the loaded ``weight [N, K]``, or ``[E, N, K]`` of experts, and store ``scale``, of any shape."""
        if self.dtype == FNUZ:
            clear_minus_zeros(weight)
            scale = 2.0 * scale
        shuffle_in_place(weight.data.view(self.dtype))
        if self.scale is None:
            self.scale = torch.empty_like(scale)
        self.scale.copy_(scale)

    def move_back(self, weight: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        unshuffle_in_place(weight.data.view(self.dtype))

    def __call__(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's ``weight`` in the device's variant of e4m3, and the scales."""
        assert self.scale is not None, "weights are adopted before they are multiplied by"
        return weight.view(self.dtype), self.scale


def shuffle_in_place(weight: torch.Tensor) -> None:
    """Preshuffle ``weight [N, K]``, or each matrix of ``[E, N, K]``, for aiter's products."""
    for matrix in weight.view(-1, *weight.shape[-2:]):
        as_bytes(matrix).copy_(as_bytes(_moved(matrix)))


def unshuffle_in_place(weight: torch.Tensor) -> None:
    """Undo :func:`shuffle_in_place`."""
    move_back(weight, _moved)


def _as_large(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


@custom_op("aiter_shuffle_weight", _as_large)
def _moved(weight: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = aiter_function("aiter.ops.shuffle.shuffle_weight")(weight, (16, 16))
    return moved


class AiterFp8Linear(LooksUpTokens):
    """See :class:`atom_core.kernels.fp8_linear.Fp8LinearKernel`.

    Where each token has its own scale, it is also a :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`.
    """

    def __init__(self, spec: Fp8LinearSpec, target: Target) -> None:
        require("aiter.static_per_tensor_quant", "aiter.dynamic_per_token_scaled_quant", "aiter.gemm_a8w8_bpreshuffle")
        self.shuffled = ShuffledWeight(target)
        self.dtype = spec.dtype
        self.form = InputForm(self.shuffled.dtype, group=None) if spec.input_scale == "dynamic" else None
        #: Factor of the static scale for the device's variant of e4m3.
        self.unit = 2.0 if self.shuffled.dtype == FNUZ else 1.0

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Preshuffle the weight."""
        self.shuffled.adopt(weight, weight_scale.data[:, None])

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for weight in weights:
            self.shuffled.move_back(weight)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``; the layer's ``weight_scale`` is not used."""
        y: torch.Tensor = _fp8_linear(x.contiguous(), *self.shuffled(weight), input_scale, self.unit)
        return y if bias is None else y.add_(bias)

    def takes_quantized(self, rows: int) -> bool:
        """Any number of rows."""
        return True

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`; ``weight_scale`` is as in a call."""
        y: torch.Tensor = _product(*x, *self.shuffled(weight), self.dtype)
        return y if bias is None else y.add_(bias)


@custom_op("aiter_fp8_linear", lambda x, weight, scale, input_scale, unit: x.new_empty(x.shape[0], weight.shape[0]))
def _fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor | None, unit: float
) -> torch.Tensor:
    rows = len(x)
    if not rows:
        return x.new_empty(0, weight.shape[0])
    quantized = torch.empty_like(x, dtype=weight.dtype)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if input_scale is None:
        aiter_function("aiter.dynamic_per_token_scaled_quant")(quantized, x, scales)
    else:
        torch.mul(input_scale.expand(rows, 1), unit, out=scales)
        aiter_function("aiter.static_per_tensor_quant")(quantized, x, scales[0])
    product: torch.Tensor = _product(quantized, scales, weight, scale, x.dtype)
    return product


def of_product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Uninitialised memory for the product of ``x [T, K]`` and ``weight [N, K]``: ``[T, N]``."""
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


@custom_op("aiter_fp8_product", of_product)
def _product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if not len(x):
        return of_product(x, x_scale, weight, scale, dtype)
    y: torch.Tensor = aiter_function("aiter.gemm_a8w8_bpreshuffle")(x, weight, x_scale, scale, dtype=dtype)
    return y
