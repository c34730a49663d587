"""Inputs of FP8 products that are quantised by what makes them: a norm or an activation, in one launch with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class InputForm:
    """What a product takes."""

    dtype: torch.dtype
    """A form of e4m3."""
    group: int | None
    """Numbers of a token that share a scale; None: all of them."""


class QuantizedInput(NamedTuple):
    """``T`` tokens for a product with ``K`` inputs; a number times its scale is the true one."""

    values: torch.Tensor
    """``[T, K]`` in FP8."""
    scales: torch.Tensor
    """Float32: ``[T, 1]``, or of groups ``[K / group, T]``, those of one group side by side."""


#: What a linear layer may be given.
LinearInput = torch.Tensor | QuantizedInput


def room(rows: int, size: int, form: InputForm, device: torch.device) -> QuantizedInput:
    """Memory without contents for ``[rows, size]`` in ``form``."""
    shape = (rows, 1) if form.group is None else (size // form.group, rows)
    values = torch.empty(rows, size, dtype=form.dtype, device=device)
    return QuantizedInput(values, torch.empty(shape, dtype=torch.float32, device=device))


@runtime_checkable
class QuantizedInputKernel(Protocol):
    """A product that multiplies what others have quantised."""

    form: InputForm | None
    """What it takes; None: this one quantises by itself."""

    def takes_quantized(self, rows: int) -> bool:
        """Whether so many rows are best given quantised."""

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``[T, K]`` to ``[T, N]``, as it does with an input that it quantises."""


def if_it_takes_quantized(kernel: object) -> QuantizedInputKernel | None:
    """``kernel``, where it multiplies what others have quantised, else None."""
    return kernel if isinstance(kernel, QuantizedInputKernel) and kernel.form is not None else None
