"""A norm and the product that reads it, in as few kernels as there are for both."""

from __future__ import annotations

import torch

from atom_core.fusion.stream import Stream, StreamNorm
from atom_core.kernels.fp8_inputs import LinearInput
from atom_core.kernels.fp8_rms_norm import FP8_RMS_NORM, Fp8RmsNormSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.normed_linear import NORMED_LINEAR, NormedLinearSpec
from atom_core.kernels.rms_norm import RMS_NORM
from atom_core.layers.linear import Linear
from atom_core.runtime import Runtime
from atom_core.types import Activation


class NormedLinear:
    """``linear(norm(stream))``, and for few tokens with the gated activation behind it.

    Args:
        norm: in front.
        linear: a layer of this rank's outputs; with an activation, of ``[gate | up]``.
        activation: the gated activation behind it, which :meth:`fused` has in its kernel and :meth:`product` has not.
        runtime: the model's.
    """

    def __init__(self, norm: StreamNorm, linear: Linear, activation: Activation | None, runtime: Runtime) -> None:
        self.norm, self.linear = norm, linear
        self.operands, self.apply = linear.method.operands, linear.method.apply
        kernels = runtime.kernels
        out_features, in_features = linear.out_features, linear.in_features
        separate = []
        if activation is not None:
            spec = GatedActivationSpec(activation, out_features // 2, runtime.dtype)
            separate.append(("gated_activation", kernels.chosen(GATED_ACTIVATION, spec)))
        by_itself = ("rms_norm", kernels.chosen(RMS_NORM, norm.layer.spec))
        separate += [by_itself, linear.method.chosen(linear, kernels)]
        self.kernel = kernels.select(
            NORMED_LINEAR, NormedLinearSpec(in_features, out_features, activation, tuple(separate))
        )
        #: Tokens up to which the kernel runs.
        self.max_rows = 0 if self.kernel is None else self.kernel.max_rows
        self.form = form = linear.method.input_form()
        self.norm_and_quantize = (
            None
            if form is None
            else kernels.select(FP8_RMS_NORM, Fp8RmsNormSpec(in_features, runtime.dtype, form, (by_itself,)))
        )

    def __call__(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, out]`` of a layer without an activation, and the stream summed up, ``[T, in]``."""
        if self.max_rows and (y := self.fused(stream)) is not None:
            return y, stream.residual
        return self.product(stream)

    def fused(self, stream: Stream) -> torch.Tensor | None:
        """``[T, out]`` by one kernel for all of it, where there is one for these rows and the stream is summed up."""
        x = stream.residual
        if stream.last is not None or self.kernel is None or not 0 < x.shape[0] <= self.max_rows:
            return None
        return self.kernel(x, self.norm.weight, self.norm.eps, self.operands(self.linear))

    def product(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``linear(norm(stream))``, without the activation, and the stream summed up."""
        normed, summed = self.norm(stream) if self.norm_and_quantize is None else self._quantized(stream)
        return self.apply(self.linear, normed, self.linear.bias), summed

    def _quantized(self, stream: Stream) -> tuple[LinearInput, torch.Tensor]:
        """What the layer multiplies, quantised where it takes it so, and the stream summed up."""
        norm = self.norm
        assert self.norm_and_quantize is not None
        if not self.linear.method.takes_quantized(stream.residual.shape[0]):
            return norm(stream)
        if norm.reduces(stream):
            assert self.form is not None
            return norm.quantized(stream, self.form) or norm(stream)
        last, residual, _ = norm.whole(stream)
        if last is None:
            return self.norm_and_quantize(residual, norm.weight, norm.eps, None)[0], residual
        quantized, total = self.norm_and_quantize(last, norm.weight, norm.eps, residual)
        assert total is not None
        return quantized, total
