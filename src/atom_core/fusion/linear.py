"""A product on the residual stream, fused with the norm before it or the residual addition after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec, QuantizingAllReduceNorm
from atom_core.kernels.fp8_inputs import InputForm, LinearInput, QuantizedInput
from atom_core.kernels.fp8_rms_norm import FP8_RMS_NORM, Fp8RmsNormSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.normed_linear import NORMED_LINEAR, NormedLinearSpec
from atom_core.kernels.normed_router import NORMED_ROUTER, NormedRouterKernel, NormedRouterSpec
from atom_core.kernels.rms_norm import RMS_NORM
from atom_core.kernels.select import KernelSet
from atom_core.layers.linear import Linear, RowLinear
from atom_core.layers.linear_methods import UnquantizedMethod
from atom_core.layers.norm import RMSNorm
from atom_core.runtime import Communicator, Runtime
from atom_core.types import Activation


def bound(linear: Linear, bias: torch.Tensor | None) -> Callable[[LinearInput], torch.Tensor]:
    """The product of a layer as one call, without lookups at each step."""
    if isinstance(linear.method, UnquantizedMethod):
        return partial(linear.kernel, weight=linear.weight, bias=bias)
    return partial(linear.method.apply, linear, bias=bias)


class Stream(NamedTuple):
    """The residual stream ``[T, hidden]``: a sum whose last addition may be left to the norm that reads it."""

    last: torch.Tensor | None
    """The term still to be added; None: there is none."""
    residual: torch.Tensor
    """The sum so far. The owner of the stream may write to both tensors."""
    is_partial: bool = False
    """Whether ``last`` is this rank's partial sum, to be summed over the tensor-parallel group first."""

    def whole(self, group: Communicator) -> Stream:
        """The same stream after the sum over ``group``, the tensor-parallel one, if that is still to do."""
        if self.last is None or not self.is_partial:
            return self
        return Stream(group.all_reduce(self.last), self.residual)


class StreamNorm:
    """A norm of the stream, including the stream's remaining additions.

    Args:
        norm: the layer with the weight.
        runtime: the model's.
    """

    def __init__(self, norm: RMSNorm, runtime: Runtime) -> None:
        self.layer, self.weight, self.eps, self.kernel = norm, norm.gain, norm.eps, norm.kernel
        self.group = group = runtime.tensor_parallel
        size, dtype = norm.spec.size, norm.spec.dtype
        #: A kernel for the sum over ranks together with the norm, if there is one.
        self.reducing = None
        if group.world_size > 1:
            spec = AllReduceNormSpec(size, dtype, group, norm.gain_is_wider)
            self.reducing = runtime.kernels.select(ALL_REDUCE_NORM, spec)
        #: The same kernel, if it can also quantise for the next product.
        self.quantizing = self.reducing if isinstance(self.reducing, QuantizingAllReduceNorm) else None

    def reduces(self, stream: Stream) -> bool:
        """Whether one kernel runs the remaining sum over ranks of ``stream`` and the norm."""
        if not stream.is_partial or stream.last is None or self.reducing is None:
            return False
        # Tracing would fix a branch on the number of tokens; compilers fuse these ops themselves.
        return not torch.compiler.is_compiling() and self.reducing.takes(stream.last)

    def quantized(self, stream: Stream, form: InputForm) -> tuple[QuantizedInput, torch.Tensor] | None:
        """The normed stream in ``form`` and the updated stream, for a stream that it :meth:`reduces`.

        None: no kernel does all of it in one launch.
        """
        kernel, last = self.quantizing, stream.last
        assert last is not None
        if kernel is None or not kernel.quantizes(last, form):
            return None
        return kernel.quantized(last, stream.residual, self.weight, self.eps, form)

    def __call__(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed stream, and the updated stream, both ``[T, hidden]``."""
        if stream.is_partial:
            if self.reduces(stream):
                assert self.reducing is not None
                assert stream.last is not None
                return self.reducing(stream.last, stream.residual, self.weight, self.eps)
            stream = stream.whole(self.group)
        if stream.last is None:
            return self.kernel(stream.residual, self.weight, self.eps, None)[0], stream.residual
        normed, summed = self.kernel(stream.last, self.weight, self.eps, stream.residual)
        assert summed is not None
        return normed, summed


def norm_and_few_outputs(norm: StreamNorm, linear: Linear, kernels: KernelSet) -> NormedRouterKernel | None:
    """What runs ``norm`` and a layer of few outputs in one launch for few tokens; None: nothing does."""
    separate = ((RMS_NORM.name, kernels.chosen(RMS_NORM, norm.layer.spec)), linear.method.chosen(linear, kernels))
    return kernels.select(NORMED_ROUTER, NormedRouterSpec(separate))


class NormedLinear:
    """``linear(norm(stream))``, and for few tokens also the gated activation after it.

    Args:
        norm: before the product.
        linear: a layer of this rank's outputs; with an activation, of ``[gate | up]``.
        activation: the gated activation, which :meth:`fused` applies and :meth:`product` does not.
        runtime: the model's.
    """

    def __init__(self, norm: StreamNorm, linear: Linear, activation: Activation | None, runtime: Runtime) -> None:
        self.norm, self.linear = norm, linear
        self.operands, self.multiply = linear.method.operands, bound(linear, linear.bias)
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
        #: Largest number of tokens for the fused kernel.
        self.max_rows = 0 if self.kernel is None else self.kernel.max_rows
        self.form = form = linear.method.input_form()
        self.norm_and_quantize = (
            None
            if form is None
            else kernels.select(FP8_RMS_NORM, Fp8RmsNormSpec(in_features, runtime.dtype, form, (by_itself,)))
        )

    def __call__(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, out]`` of a layer without an activation, and the updated stream, ``[T, in]``."""
        if self.max_rows and (y := self.fused(stream)) is not None:
            return y, stream.residual
        return self.product(stream)

    def fused(self, stream: Stream) -> torch.Tensor | None:
        """``[T, out]`` by one kernel, if it supports these rows and the stream has no remaining additions."""
        x = stream.residual
        if stream.last is not None or self.kernel is None or not 0 < x.shape[0] <= self.max_rows:
            return None
        return self.kernel(x, self.norm.weight, self.norm.eps, self.operands(self.linear))

    def product(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """``linear(norm(stream))``, without the activation, and the updated stream."""
        normed, summed = self.norm(stream) if self.norm_and_quantize is None else self._quantized(stream)
        return self.multiply(normed), summed

    def _quantized(self, stream: Stream) -> tuple[LinearInput, torch.Tensor]:
        """The layer's input, quantised where it takes it so, and the updated stream."""
        norm = self.norm
        assert self.norm_and_quantize is not None
        if not self.linear.method.takes_quantized(stream.residual.shape[0]):
            return norm(stream)
        if norm.reduces(stream):
            assert self.form is not None
            return norm.quantized(stream, self.form) or norm(stream)
        last, residual, _ = stream.whole(norm.group)
        if last is None:
            return self.norm_and_quantize(residual, norm.weight, norm.eps, None)[0], residual
        quantized, total = self.norm_and_quantize(last, norm.weight, norm.eps, residual)
        assert total is not None
        return quantized, total


class NormedLinearAndGates:
    """``linear(norm(stream))`` and ``gates(norm(stream))``, where ``gates`` has few outputs.

    Args:
        norm: before both products.
        linear, gates: layers of this rank's outputs.
        runtime: the model's.
    """

    def __init__(self, norm: StreamNorm, linear: Linear, gates: Linear, runtime: Runtime) -> None:
        self.norm, self.gates = norm, gates
        self.normed, self.normed_gates = (NormedLinear(norm, it, None, runtime) for it in (linear, gates))
        self.norm_and_gates = norm_and_few_outputs(norm, gates, runtime.kernels)
        #: Whether both products apply the norm themselves to one token.
        self.norm_one = self.normed.max_rows > 0 and self.normed_gates.max_rows > 0
        form = linear.method.input_form()
        #: The form in which :attr:`norm_and_gates` hands the norm's result to the larger product; None: as it is.
        self.form = None if form is None or form.group is None else form

    def __call__(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[T, out]`` of ``linear`` and of ``gates``, and the updated stream, ``[T, in]``."""
        # Tracing would fix a branch on the number of tokens.
        if stream.last is None and not torch.compiler.is_compiling():
            x = stream.residual
            if self.norm_and_gates is not None and len(x) in self.norm_and_gates.tokens:
                return *self._by_gates(x, self.norm_and_gates), x
            if len(x) == 1 and self.norm_one:
                y, gates = self.normed.fused(stream), self.normed_gates.fused(stream)
                assert y is not None
                assert gates is not None
                return y, gates, x
        normed, summed = self.norm(stream)
        return self.normed.multiply(normed), self.normed_gates.multiply(normed), summed

    def _by_gates(self, x: torch.Tensor, kernel: NormedRouterKernel) -> tuple[torch.Tensor, torch.Tensor]:
        given = x, self.norm.weight, self.norm.eps, self.normed_gates.operands(self.gates)
        if self.form is None:
            normed, gates = kernel(*given)
            return self.normed.multiply(normed), gates
        quantized, gates = kernel.quantized(*given, self.form)
        return self.normed.multiply(quantized), gates


class ResidualLinear:
    """The product after attention, or the last of a feed-forward network, added to the stream."""

    def __init__(self, linear: RowLinear) -> None:
        self.linear, self.is_partial = linear, linear.group.world_size > 1
        #: Every rank has the whole bias, which enters the sum over ranks once.
        self.bias = linear.bias if linear.group.rank == 0 else None
        self.multiply = bound(linear, self.bias)
        method = linear.method
        never_adds = self.is_partial or (isinstance(method, UnquantizedMethod) and method.adding is None)
        #: Adds to the residual within the product, if a kernel supports these rows.
        self.add = None if never_adds else method.add

    def __call__(self, x: LinearInput, residual: torch.Tensor) -> Stream:
        """The product of ``x``, added to ``residual [T, hidden]``, which is written to."""
        # Products of quantised inputs do not add to the residual.
        if self.add is not None and isinstance(x, torch.Tensor):
            summed = self.add(self.linear, x, self.bias, residual)
            if summed is not None:
                return Stream(None, summed)
        return Stream(self.multiply(x), residual, self.is_partial)
