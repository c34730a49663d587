"""The gated feed-forward network: norm, product, activation, product, residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom_core.fusion.linear import NormedLinear, ResidualLinear, Stream, StreamNorm
from atom_core.kernels.fp8_gated_activation import FP8_GATED_ACTIVATION, Fp8GatedActivationSpec
from atom_core.kernels.fp8_inputs import LinearInput
from atom_core.kernels.gated_activation import GATED_ACTIVATION
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Linear
from atom_core.layers.mlp import GatedMLP
from atom_core.runtime import Runtime


def fused_activation(
    activation: GatedActivation, next_layer: Linear, runtime: Runtime
) -> Callable[[torch.Tensor], LinearInput]:
    """``act(gate) * up`` of ``[gate | up]``, quantised if one kernel does both and the next layer takes that form.

    Args:
        activation: the plain layer.
        next_layer: the layer that reads the result.
        runtime: the model's.

    Returns:
        A function from ``[T, 2N]`` to ``[T, N]``.
    """
    spec, method = activation.spec, next_layer.method
    form = method.input_form()
    if form is None:
        return activation.kernel
    separate = (("gated_activation", runtime.kernels.chosen(GATED_ACTIVATION, spec)),)
    quantizing = runtime.kernels.select(
        FP8_GATED_ACTIVATION, Fp8GatedActivationSpec(spec.activation, spec.size, runtime.dtype, form, separate)
    )
    if quantizing is None:
        return activation.kernel

    def activate(x: torch.Tensor) -> LinearInput:
        return quantizing(x) if method.takes_quantized(x.shape[0]) else activation.kernel(x)

    return activate


class GatedLinear:
    """``act(linear(norm(stream)))``.

    Args:
        norm: before the product.
        linear: of ``[gate | up]``, this rank's shard.
        activation: the plain layer.
        next_layer: the layer that reads the result.
        runtime: the model's.
    """

    def __init__(
        self, norm: StreamNorm, linear: Linear, activation: GatedActivation, next_layer: Linear, runtime: Runtime
    ) -> None:
        self.activate = fused_activation(activation, next_layer, runtime)
        self.gate_up = NormedLinear(norm, linear, activation.spec.activation, runtime)

    def __call__(self, stream: Stream) -> tuple[LinearInput, torch.Tensor]:
        """``[T, out]``, and the updated stream, ``[T, in]``."""
        if self.gate_up.max_rows and (y := self.gate_up.fused(stream)) is not None:
            return y, stream.residual
        y, summed = self.gate_up.product(stream)
        return self.activate(y), summed


class FusedMLP:
    """A norm and the network after it, added to the stream."""

    def __init__(self, norm: StreamNorm, mlp: GatedMLP, runtime: Runtime) -> None:
        self.gate_up = GatedLinear(norm, mlp.gate_up_proj, mlp.activation, mlp.down_proj, runtime)
        self.down = ResidualLinear(mlp.down_proj)

    def __call__(self, stream: Stream) -> Stream:
        """The stream after the network."""
        return self.down(*self.gate_up(stream))
