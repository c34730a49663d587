"""Norm layers."""

from __future__ import annotations

import torch

from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.layers.parameters import ParameterLayer, empty_parameter
from atom_core.runtime import Runtime


class NormWeight(ParameterLayer):
    """The weight ``[N]`` of an RMS norm.

    Args:
        size: ``N``.
        eps: added to the mean square.
        runtime: the model's.
        zero_centered: whether the norm multiplies by ``1 + weight``, so that a weight of zeros changes nothing.
    """

    one_plus_weight: torch.Tensor

    def __init__(self, size: int, eps: float, runtime: Runtime, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight, self.eps = empty_parameter(runtime, size), eps
        if zero_centered:
            # The sum is float32, as in Transformers: in 16 bits, 1 + weight loses most of a small weight.
            ones = torch.empty(size, dtype=torch.float32, device=runtime.device)
            self.register_buffer("one_plus_weight", ones, persistent=False)
        self.zero_centered = zero_centered

    @property
    def gain(self) -> torch.Tensor:
        """What the normed values are multiplied by: the weight, or float32 ``1 + weight`` of closed weights."""
        gain: torch.Tensor = self.one_plus_weight if self.zero_centered else self.weight
        return gain

    @property
    def gain_is_wider(self) -> bool:
        """Whether the gain is float32 in a model of 16 bits."""
        return self.gain.dtype != self.weight.dtype

    def finalize_weights(self) -> None:
        """See :class:`ParameterLayer`; the weight stays as it is."""
        if self.zero_centered:
            self.one_plus_weight.copy_(self.weight.detach()).add_(1)

    @property
    def changes_form(self) -> bool:
        """See :class:`ParameterLayer`."""
        return False


class RMSNorm(NormWeight):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float, runtime: Runtime, zero_centered: bool = False) -> None:
        super().__init__(size, eps, runtime, zero_centered)
        self.spec = RmsNormSpec(size, runtime.dtype, self.gain_is_wider)
        self.kernel = runtime.kernels.select(RMS_NORM, self.spec)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``norm(x + residual)`` and the sum, both ``[T, N]``; the inputs stay as they are."""
        if residual is None:
            return self.kernel(x, self.gain, self.eps, None)[0], x
        normed, summed = self.kernel(x, self.gain, self.eps, residual.clone())
        assert summed is not None
        return normed, summed


class HeadNorm(NormWeight):
    """The weight of a norm over each head of q or k, which the attention op applies before rope."""
