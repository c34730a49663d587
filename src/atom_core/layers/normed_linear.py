"""A linear layer behind a norm, run in as few kernels as there are for it."""

from __future__ import annotations

import torch

from atom_core.kernels.fp8_inputs import LinearInput
from atom_core.kernels.fp8_rms_norm import FP8_RMS_NORM, Fp8RmsNormSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.normed_linear import NORMED_LINEAR, NormedLinearSpec
from atom_core.kernels.rms_norm import RMS_NORM
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.runtime import Runtime
from atom_core.types import Activation


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
        by_itself = ("rms_norm", kernels.chosen(RMS_NORM, norm.spec))
        separate += [by_itself, linear.method.chosen(linear, kernels)]
        fused = NormedLinearSpec(in_features, out_features, activation, tuple(separate))
        self.fused = kernels.select(NORMED_LINEAR, fused) if runtime.fuses_modules else None
        self.form = form = linear.method.input_form() if runtime.fuses_modules else None
        self.norm_and_quantize = (
            None
            if form is None
            else kernels.select(FP8_RMS_NORM, Fp8RmsNormSpec(in_features, runtime.dtype, form, (by_itself,)))
        )

    def __call__(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, out]``, and the stream summed up, ``[T, in]``."""
        if (y := self.fused_result(stream)) is not None:
            return y, stream.residual
        y, summed = self.product(stream)
        return y if self.activate is None else self.activate(y), summed

    def fused_result(self, stream: Stream) -> torch.Tensor | None:
        """``[T, out]`` by one kernel for all of it, where there is one for these rows and the stream is summed up."""
        norm, linear = self.norm, self.linear
        x = stream.residual
        if self.fused is None or stream.last is not None or not 0 < x.shape[0] <= self.fused.max_rows:
            return None
        return self.fused(x, norm.weight, norm.eps, linear.method.operands(linear))

    def product(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``linear(norm(stream))``, without the activation, and the stream summed up."""
        normed, summed = self._normed(stream)
        return self.linear(normed), summed

    def _normed(self, stream: Stream) -> tuple[LinearInput, torch.Tensor]:
        """What the layer multiplies, and the stream summed up."""
        norm = self.norm
        if self.norm_and_quantize is None or not self.linear.method.takes_quantized(stream.residual.shape[0]):
            x, summed = norm(stream)
            return x, summed
        if norm.sums(stream):
            assert self.form is not None
            x, summed = norm.quantized(stream, self.form) or norm(stream)
            return x, summed
        last, residual = stream.whole(norm.group)
        if last is None:
            return self.norm_and_quantize(residual, norm.weight, norm.eps, None)[0], residual
        quantized, total = self.norm_and_quantize(last, norm.weight, norm.eps, residual)
        assert total is not None
        return quantized, total
