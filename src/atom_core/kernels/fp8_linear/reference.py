"""The product as it is defined, in float32; and quantisation to FP8."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
#: The largest e4m3fn value, to which the largest magnitude of a row is scaled.
LIMIT = 448.0
#: Lower bound of a row's largest magnitude, so that a row of zeros has a scale above 0.
SMALLEST = 1e-12


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """The scale of each row of ``x [R, C]``: float32 ``[R, 1]``; NaN where a row has one."""
    # On a GPU torch divides by a Python number through its inverse, which may not give the nearest float32.
    limit = torch.full((), LIMIT, device=x.device)
    return x.abs().amax(-1, keepdim=True).float().clamp_min(SMALLEST) / limit


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` in e4m3, clamped to its range; NaN stays NaN.

    As in kernels, it multiplies by the scale's inverse, which may round some values the other way.
    """
    return (x.float() * scale.reciprocal()).clamp_(-LIMIT, LIMIT).to(E4M3)


def quantize_input(x: torch.Tensor, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, K]`` in e4m3 and its scales, ``[T, 1]`` or, where static, ``[1]``."""
    scale = row_scales(x) if input_scale is None else input_scale
    return to_e4m3(x, scale), scale


class ReferenceFp8Linear:
    """See :mod:`atom_core.kernels.fp8_linear`. Each call converts the whole weight to float32."""

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Weights stay as they are."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        quantized, scale = quantize_input(x, input_scale)
        y = (quantized.float() @ weight.float().T) * scale * weight_scale
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype)
