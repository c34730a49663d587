"""A linear layer behind a norm, run in as few kernels as there are for it."""

from __future__ import annotations

import torch

from atom_core.config import Activation
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.normed_linear import NORMED_LINEAR, NormedLinearSpec
from atom_core.kernels.rms_norm import RMS_NORM
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.runtime import Runtime


class NormedLinear:
    """``act(linear(norm(stream)))``; the layers are referred to, and belong to the modules that are named so.

    Args:
        norm: in front.
        linear: a layer of this rank's outputs; with an activation, of ``[gate | up]``.
        activation: the gated activation behind it.
        runtime: the model's.
    """

    def __init__(self, norm: RMSNorm, linear: Linear, activation: Activation | None, runtime: Runtime) -> None:
        self.norm, self.linear = norm, linear
        kernels = runtime.kernels
        out_features, in_features = linear.out_features, linear.in_features
        self.activate, separate = None, []
        if activation is not None:
            spec = GatedActivationSpec(activation, out_features // 2, runtime.dtype)
            self.activate = kernels.select(GATED_ACTIVATION, spec)
            separate.append(("gated_activation", kernels.chosen(GATED_ACTIVATION, spec)))
        separate += [("rms_norm", kernels.chosen(RMS_NORM, norm.spec)), linear.method.chosen(linear, kernels)]
        self.fused = kernels.select(
            NORMED_LINEAR, NormedLinearSpec(in_features, out_features, activation, tuple(separate))
        )

    def __call__(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, out]``, and the stream summed up, ``[T, in]``."""
        norm, linear = self.norm, self.linear
        x = stream.residual
        if self.fused is not None and stream.last is None and 0 < x.shape[0] <= self.fused.max_rows:
            return self.fused(x, norm.weight, norm.eps, linear.method.operands(linear)), x
        x, summed = norm(stream)
        y = linear(x)
        return y if self.activate is None else self.activate(y), summed
