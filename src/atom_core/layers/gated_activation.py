"""The gated activation of a feed-forward network."""

from __future__ import annotations

import torch

from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.runtime import Runtime
from atom_core.types import Activation


class GatedActivation:
    """``act(gate) * up`` of ``[gate | up]``.

    Args:
        activation: the function.
        size: of the result.
        runtime: the model's.
    """

    def __init__(self, activation: Activation, size: int, runtime: Runtime) -> None:
        self.spec = GatedActivationSpec(activation, size, runtime.dtype)
        self.kernel = runtime.kernels.select(GATED_ACTIVATION, self.spec)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, 2N]`` to ``[T, N]``."""
        return self.kernel(x)
