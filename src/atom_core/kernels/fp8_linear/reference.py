"""The product as it is defined, in float32; and how numbers become FP8."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
#: The largest number of e4m3, and so what the largest magnitude of a row becomes.
LIMIT = 448.0
#: Magnitudes below are taken for this one, so that a row of zeros has a scale to divide by.
SMALLEST = 1e-12


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """The scale of each row of ``x [R, C]``: float32 ``[R, 1]``; NaN where a row has one."""
    # On a GPU torch divides by a number of the host's by multiplying, which may miss the nearest float32.
    limit = torch.full((), LIMIT, device=x.device)
    return x.abs().amax(-1, keepdim=True).float().clamp_min(SMALLEST) / limit


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` in e4m3, cut to what that holds; NaN stays NaN.

    It is multiplied by what 1 is of the scale, as kernels do, which may round some numbers the other way.
    """
    return (x.float() * scale.reciprocal()).clamp_(-LIMIT, LIMIT).to(E4M3)


def quantize_input(x: torch.Tensor, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, K]`` in e4m3 and its scales, ``[T, 1]`` or, where static, ``[1]``."""
    scale = row_scales(x) if input_scale is None else input_scale
    return to_e4m3(x, scale), scale


class ReferenceFp8Linear:
    """See :mod:`atom_core.kernels.fp8_linear`. Each call widens the whole weight."""

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Nothing to change."""

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
