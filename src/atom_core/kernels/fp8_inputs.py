"""Inputs of FP8 products that the op before (a norm or an activation) quantises in its own launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class InputForm:
    """The form in which a product takes its input."""

    dtype: torch.dtype
    """A variant of e4m3."""
    group: int | None
    """Elements of a token that share a scale; None: all of them."""


class QuantizedInput(NamedTuple):
    """``T`` tokens for a product with ``K`` inputs; an element is its value times its scale."""

    values: torch.Tensor
    """``[T, K]`` in FP8."""
    scales: torch.Tensor
    """float32: ``[T, 1]``, or of groups ``[ceil(K / group), T]``."""


#: The input of a linear layer.
LinearInput = torch.Tensor | QuantizedInput


def empty_quantized(rows: int, size: int, form: InputForm, device: torch.device) -> QuantizedInput:
    """Uninitialised memory for ``[rows, size]`` in ``form``."""
    shape = (rows, 1) if form.group is None else (-(-size // form.group), rows)
    values = torch.empty(rows, size, dtype=form.dtype, device=device)
    return QuantizedInput(values, torch.empty(shape, dtype=torch.float32, device=device))


@runtime_checkable
class QuantizedInputKernel(Protocol):
    """A product that can take quantised inputs."""

    form: InputForm | None
    """The form of quantised inputs; None: this product quantises its inputs itself."""

    def takes_quantized(self, rows: int) -> bool:
        """Whether quantised inputs are faster for ``rows``."""

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``[T, K]`` to ``[T, N]``, as with an input that it quantises itself.

        For 2 to 16 tokens, and for those that :meth:`takes_quantized` tells.
        """


def as_quantized_input_kernel(kernel: object) -> QuantizedInputKernel | None:
    """``kernel``, if it can take quantised inputs, else None."""
    return kernel if isinstance(kernel, QuantizedInputKernel) and kernel.form is not None else None
