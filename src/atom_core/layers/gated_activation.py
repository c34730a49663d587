"""The gated activation of a feed-forward network, in the form that the layer behind it takes."""

from __future__ import annotations

import torch

from atom_core.kernels.fp8_gated_activation import FP8_GATED_ACTIVATION, Fp8GatedActivationSpec
from atom_core.kernels.fp8_inputs import LinearInput
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.layers.normed_linear import NormedLinear
from atom_core.runtime import Runtime
from atom_core.types import Activation


class GatedActivation:
    """``act(gate) * up`` of ``[gate | up]``, quantised where one kernel does both and the layer behind takes it so.

    Args:
        activation: the function.
        behind: the layer that reads the result, and has its width.
        runtime: the model's.
    """

    def __init__(self, activation: Activation, behind: Linear, runtime: Runtime) -> None:
        kernels, size = runtime.kernels, behind.in_features
        spec = GatedActivationSpec(activation, size, runtime.dtype)
        self.kernel, self.method = kernels.select(GATED_ACTIVATION, spec), behind.method
        form = behind.method.input_form() if runtime.fuses_modules else None
        self.quantizing = None
        if form is not None:
            separate = (("gated_activation", kernels.chosen(GATED_ACTIVATION, spec)),)
            self.quantizing = kernels.select(
                FP8_GATED_ACTIVATION, Fp8GatedActivationSpec(activation, size, runtime.dtype, form, separate)
            )

    def __call__(self, x: torch.Tensor) -> LinearInput:
        """``x [T, 2N]`` to ``[T, N]``."""
        if self.quantizing is None or not self.method.takes_quantized(x.shape[0]):
            return self.kernel(x)
        return self.quantizing(x)


class GatedLinear:
    """``act(linear(norm(stream)))``; the layers are referred to, and belong to the modules that are named so.

    Args:
        norm: in front.
        linear: of ``[gate | up]``, as this rank holds them.
        activation: the function.
        behind: the layer that reads the result.
        runtime: the model's.
    """

    def __init__(self, norm: RMSNorm, linear: Linear, activation: Activation, behind: Linear, runtime: Runtime) -> None:
        self.activate = GatedActivation(activation, behind, runtime)
        self.enter = NormedLinear(norm, linear, activation, runtime)

    def __call__(self, stream: Stream) -> tuple[LinearInput, torch.Tensor]:
        """``[T, out]``, and the stream summed up, ``[T, in]``."""
        if (y := self.enter.fused_result(stream)) is not None:
            return y, stream.residual
        y, summed = self.enter.product(stream)
        return self.activate(y), summed
