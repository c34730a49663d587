"""Norm layers, and the residual stream that they read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec, QuantizingAllReduceNorm
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.layers.parameters import ParameterLayer, empty_parameter
from atom_core.runtime import Communicator, Runtime


class Stream(NamedTuple):
    """The residual stream ``[T, hidden]``: a sum whose last addition may be left to the norm that reads it."""

    last: torch.Tensor | None
    """What is still to be added; None: nothing is."""
    residual: torch.Tensor
    """The sum so far. Whoever has the stream may write to both."""

    @property
    def is_part(self) -> bool:
        """Whether ``last`` is this rank's part of what is to be added."""
        return False

    def whole(self, group: Communicator) -> Stream:
        """The same stream, with no sum over ``group``, the tensor-parallel one, left to do."""
        if self.last is None or not self.is_part:
            return self
        return Stream(group.all_reduce(self.last), self.residual)


class PartStream(Stream):
    """A stream to which the sum of ``last`` over the tensor-parallel group is still to be added."""

    @property
    def is_part(self) -> bool:
        """See :class:`Stream`."""
        return True


class RMSNorm(ParameterLayer):
    """Root mean square norm of the residual stream."""

    def __init__(self, size: int, eps: float, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, size)
        self.eps = eps
        self.spec = RmsNormSpec(size, runtime.dtype)
        self.kernel = runtime.kernels.select(RMS_NORM, self.spec)
        self.group = group = runtime.tensor_parallel
        self.fuses_modules = runtime.fuses_modules
        #: The norm together with the sum over ranks in front of it, where there is a kernel for both.
        self.reducing = None
        if group.world_size > 1 and runtime.fuses_modules:
            self.reducing = runtime.kernels.select(ALL_REDUCE_NORM, AllReduceNormSpec(size, runtime.dtype, group))
        #: The same, where it can quantise for the product behind as well.
        self.quantizing = self.reducing if isinstance(self.reducing, QuantizingAllReduceNorm) else None

    def sums(self, stream: Stream) -> bool:
        """Whether the sum over ranks that is left in ``stream`` and the norm are one kernel's."""
        if stream.last is None or not stream.is_part or self.reducing is None:
            return False
        # A branch on the number of tokens, which tracing would freeze; what compiles fuses them itself.
        return not torch.compiler.is_compiling() and self.reducing.takes(stream.last)

    def quantized(self, stream: Stream, form: InputForm) -> tuple[QuantizedInput, torch.Tensor] | None:
        """The normed stream in ``form`` and the stream summed up, of one that :meth:`sums`.

        None: no kernel has all of it in one launch.
        """
        kernel, last = self.quantizing, stream.last
        assert last is not None
        if kernel is None or not kernel.quantizes(last, form):
            return None
        return kernel.quantized(last, stream.residual, self.weight, self.eps, form)

    def forward(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed stream, and the stream summed up, both ``[T, N]``."""
        if self.sums(stream):
            assert self.reducing is not None
            assert stream.last is not None
            return self.reducing(stream.last, stream.residual, self.weight, self.eps)
        stream = stream.whole(self.group)
        if stream.last is None:
            return self.kernel(stream.residual, self.weight, self.eps, None)[0], stream.residual
        # What hooks have seen of the stream stays as it was.
        residual = stream.residual if self.fuses_modules else stream.residual.clone()
        normed, summed = self.kernel(stream.last, self.weight, self.eps, residual)
        assert summed is not None
        return normed, summed


class HeadNorm(ParameterLayer):
    """The weight of a norm over each head of q or k; the attention op applies it, together with rope."""

    def __init__(self, head_dim: int, eps: float, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, head_dim)
        self.eps = eps
