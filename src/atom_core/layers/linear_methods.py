"""How a linear layer stores its weight and multiplies by it: in the model's dtype, or quantised.

A method registers parameters on the layer under their checkpoint names, and gives this rank's placement of each
checkpoint tensor. The layer lists the checkpoint matrices of its weight (:class:`Shard`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from atom_core.kernels.fp8_inputs import InputForm, LinearInput, as_quantized_input_kernel
from atom_core.kernels.fp8_linear import FP8_LINEAR, FewRowsFp8Kernel, Fp8LinearSpec
from atom_core.kernels.fp8_linear.reference import E4M3, row_scales, to_e4m3
from atom_core.kernels.linear import LINEAR, AddingLinearKernel, LinearKernel, LinearSpec, PackingLinearKernel
from atom_core.kernels.moved import MovingKernel
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.select import KernelSet
from atom_core.layers.parameters import Placement, empty_parameter
from atom_core.quant.fp8 import Fp8Config
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from atom_core.layers.linear import Linear

#: Rows of a weight that are quantised at a time, so that the temporary float32 copy stays small.
_CHUNK = 4096
NOT_FINITE = "holds numbers that are not finite, which FP8 cannot scale"


@dataclass(frozen=True)
class Shard:
    """One matrix ``[rows, columns]`` of a checkpoint, and this rank's shard of it: some rows or some columns.

    Indices past the matrix are zeros.
    """

    module: str
    """As in :meth:`atom_core.layers.parameters.ParameterLayer.placements`."""
    rows: int
    columns: int
    my_rows: range
    my_columns: range
    begin: int = 0
    """The first row of this shard in the layer."""

    @property
    def is_padded(self) -> bool:
        """Whether some rows or columns are zeros."""
        return self.my_rows.stop > self.rows or self.my_columns.stop > self.columns

    def of_matrix(self, parameter: torch.Tensor, kind: type[Placement] = Placement) -> Placement:
        """The placement of this rank's shard of the matrix."""
        shape = (self.rows, self.columns)
        if self.my_columns != range(self.columns):
            source, count, padding = stored(self.my_columns, self.columns)
            return kind(parameter, shape, dim=1, source=source, count=count, padding=padding)
        source, count, padding = stored(self.my_rows, self.rows)
        return kind(parameter, shape, source=source, target=self.begin, count=count, padding=padding)

    def of_rows(self, parameter: torch.Tensor, kind: type[Placement] = Placement) -> Placement:
        """The placement of this rank's rows of a vector with one element per row."""
        source, count, padding = stored(self.my_rows, self.rows)
        return kind(parameter, (self.rows,), source=source, target=self.begin, count=count, padding=padding)


def stored(mine: range, total: int) -> tuple[int, int, int]:
    """For the indices ``mine`` below ``total``: the first, their number, and the number of indices past ``total``."""
    source = min(mine.start, total)
    count = min(mine.stop, total) - source
    return source, count, len(mine) - count


class LinearMethod(Protocol):
    """One form of the weight; one object per layer."""

    def create(self, layer: Linear, runtime: Runtime) -> None:
        """Register the parameters; ``layer`` has its sizes, its shards and its bias."""

    def placements(self, layer: Linear, shard: Shard) -> Iterator[tuple[str, Placement]]:
        """(tensor name, placement) of each checkpoint tensor of ``shard``, except the bias."""

    def input_form(self) -> InputForm | None:
        """The form of quantised inputs that :meth:`apply` supports; None: none."""

    def takes_quantized(self, rows: int) -> bool:
        """Whether quantised inputs are faster for ``rows``."""

    def apply(self, layer: Linear, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [T, in]``, possibly quantised in that form, to ``[T, out]``."""

    def add(
        self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """``residual += x W^T + b`` where one kernel does both, else None."""

    def chosen(self, layer: Linear, kernels: KernelSet) -> tuple[str, str]:
        """The names of the op that multiplies and of its chosen implementation."""

    def operands(self, layer: Linear) -> Operands:
        """The operands of Triton's kernels for few rows."""

    def finalize(self, layer: Linear) -> None:
        """Called after loading, and again after new weights were loaded."""

    def restore(self, layer: Linear, whole: bool) -> None:
        """See :meth:`ParameterLayer.restore_weights`."""


class UnquantizedMethod:
    """The model's dtype; see :class:`LinearMethod`."""

    def create(self, layer: Linear, runtime: Runtime) -> None:
        """Register the weight."""
        layer.weight = empty_parameter(runtime, layer.out_features, layer.in_features)
        layer.spec = LinearSpec(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            runtime.dtype,
            float32_result=layer.float32_result,
        )
        layer.kernel = runtime.kernels.select(LINEAR, layer.spec)
        self.adding = layer.kernel if isinstance(layer.kernel, AddingLinearKernel) else None

    def placements(self, layer: Linear, shard: Shard) -> Iterator[tuple[str, Placement]]:
        """The weight."""
        yield "weight", shard.of_matrix(layer.weight)

    def input_form(self) -> InputForm | None:
        """See :class:`LinearMethod`."""
        return None

    def takes_quantized(self, rows: int) -> bool:
        """See :class:`LinearMethod`."""
        return False

    def apply(self, layer: Linear, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`LinearMethod`."""
        assert isinstance(x, torch.Tensor)
        return layer.kernel(x, layer.weight, bias)

    def add(
        self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """See :class:`LinearMethod`."""
        return None if self.adding is None else self.adding.add(x, layer.weight, bias, residual)

    def chosen(self, layer: Linear, kernels: KernelSet) -> tuple[str, str]:
        """See :class:`LinearMethod`."""
        return LINEAR.name, kernels.chosen(LINEAR, layer.spec)

    def operands(self, layer: Linear) -> Operands:
        """See :class:`LinearMethod`."""
        return Operands(layer.weight, layer.bias, float32_result=layer.float32_result)

    def finalize(self, layer: Linear) -> None:
        """Give the weight to the kernel; if that stores a form of its own, ours is freed."""
        if layer.kernel.adopt(layer.weight, layer.bias):
            layer.weight.data = layer.weight.new_empty(0)

    def restore(self, layer: Linear, whole: bool) -> None:
        """See :class:`LinearMethod`."""
        if not layer.weight.numel():
            layer.weight.data = unpacked(layer.kernel, layer.weight, (layer.out_features, layer.in_features), whole)


def unpacked(kernel: LinearKernel, freed: torch.Tensor, shape: tuple[int, int], whole: bool) -> torch.Tensor:
    """A replacement for a ``freed`` weight of ``shape``: the kernel's, or if ``whole`` uninitialised memory."""
    if whole:
        return freed.new_empty(shape)
    assert isinstance(kernel, PackingLinearKernel), "a kernel that keeps a weight alone can give it back"
    return kernel.unpacked()


class Fp8Method:
    """FP8 with one float32 scale per row, whatever the checkpoint has; see :class:`LinearMethod`.

    A checkpoint that is not FP8 is quantised tensor by tensor on loading, so the device has at most one of its tensors
    at a time. Scales belong to whole rows, however many ranks share them, so ranks agree without communication.
    """

    def __init__(self, scheme: Fp8Config) -> None:
        self.scheme = scheme

    def create(self, layer: Linear, runtime: Runtime) -> None:
        """Register the weight, its scales and, where it is static, the input scale of each shard."""
        self.spec = Fp8LinearSpec(
            layer.in_features, layer.out_features, layer.bias is not None, runtime.dtype, self.scheme.input_scale
        )
        self.kernel = runtime.kernels.select(FP8_LINEAR, self.spec)
        self.few_rows_kernel = self.kernel if isinstance(self.kernel, FewRowsFp8Kernel) else None
        self.quantized_input_kernel = as_quantized_input_kernel(self.kernel)
        self.static = self.scheme.input_scale == "static"

        layer.weight = empty_fp8(runtime, layer.out_features, layer.in_features)
        layer.weight_scale = empty_scales(runtime, layer.out_features)
        if self.static:
            layer.input_scale = empty_scales(runtime, len(layer.shards))
            #: The largest input scale, which the layer uses.
            self.max_input_scale = torch.empty(1, dtype=torch.float32, device=runtime.device)

    def placements(self, layer: Linear, shard: Shard) -> Iterator[tuple[str, Placement]]:
        """An FP8 checkpoint's tensors, or the weight to quantise."""
        if not self.scheme.serialized:
            yield "weight", QuantizingPlacement.of(shard, layer.weight, layer.weight_scale)
            return
        yield "weight", shard.of_matrix(layer.weight, Fp8Placement)
        yield "weight_scale", shard.of_rows(layer.weight_scale, ScalePlacement)
        if self.static:
            index = layer.shards.index(shard)
            yield "input_scale", InputScalePlacement(layer.input_scale, (1,), target=index, count=1)

    def input_form(self) -> InputForm | None:
        """See :class:`LinearMethod`."""
        return None if self.quantized_input_kernel is None else self.quantized_input_kernel.form

    def takes_quantized(self, rows: int) -> bool:
        """See :class:`LinearMethod`."""
        return self.quantized_input_kernel is not None and self.quantized_input_kernel.takes_quantized(rows)

    def apply(self, layer: Linear, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`LinearMethod`."""
        if isinstance(x, torch.Tensor):
            return self.kernel(x, layer.weight, layer.weight_scale, self._input_scale(layer), bias)
        assert self.quantized_input_kernel is not None
        return self.quantized_input_kernel.multiply(x, layer.weight, layer.weight_scale, bias)

    def _input_scale(self, layer: Linear) -> torch.Tensor | None:
        return self.max_input_scale if self.static else None

    def add(
        self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """See :class:`LinearMethod`."""
        if self.few_rows_kernel is None or not 0 < x.shape[0] <= self.few_rows_kernel.max_rows:
            return None
        return self.few_rows_kernel.add(x, layer.weight, layer.weight_scale, self._input_scale(layer), bias, residual)

    def chosen(self, layer: Linear, kernels: KernelSet) -> tuple[str, str]:
        """See :class:`LinearMethod`."""
        return FP8_LINEAR.name, kernels.chosen(FP8_LINEAR, self.spec)

    def operands(self, layer: Linear) -> Operands:
        """See :class:`LinearMethod`."""
        assert self.few_rows_kernel is not None, "few rows are asked for where the Triton kernel was chosen"
        weight = self.few_rows_kernel.stored(layer.weight)
        return Operands(weight, layer.bias, layer.weight_scale, self._input_scale(layer))

    def finalize(self, layer: Linear) -> None:
        """Shards with the same input share the largest of their input scales, which clips no values."""
        if self.static:
            self.max_input_scale.copy_(layer.input_scale.max())
        self.kernel.adopt(layer.weight, layer.weight_scale)

    def restore(self, layer: Linear, whole: bool) -> None:
        """See :class:`LinearMethod`."""
        if isinstance(self.kernel, MovingKernel) and not whole:
            self.kernel.move_back(layer.weight)


class Fp8Placement(Placement):
    """A weight that is stored in FP8."""

    dtypes = ("F8_E4M3",)

    def dtype_problem(self, dtype: str) -> str | None:
        """See :class:`Placement`."""
        if dtype in self.dtypes:
            return None
        return f"is stored as {dtype}, but config.json says FP8 (F8_E4M3) and does not leave this module out"


class ScalePlacement(Placement):
    """One scale for all rows, or one for each: ``[rows]``, ``[rows, 1]``, or one element of any shape."""

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """See :class:`Placement`."""
        (rows,) = self.shape
        if shape not in ((rows,), (rows, 1)) and any(size != 1 for size in shape):
            allowed = "one number" if rows == 1 else f"one number or {[rows, 1]}"
            return f"is {list(shape)}, should be {allowed}"
        return self.dtype_problem(dtype)

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        check_scales(tensor)

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        self.check(tensor)
        super().load(tensor.reshape(-1).expand(self.shape))


class InputScalePlacement(ScalePlacement):
    """The scale by which inputs are divided."""

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        super().check(tensor)
        if not bool((tensor > 0).all()):
            raise ValueError("holds a scale of 0, by which no input can be divided")


class UnusedScalePlacement(ScalePlacement):
    """A scale that a checkpoint must have, although no product uses it."""

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`; the scale is only checked."""
        self.check(tensor)

    def store(self, out: torch.Tensor) -> None:
        """See :class:`Placement`; there is nothing to store."""


def check_scales(tensor: torch.Tensor) -> None:
    """Check that scales are finite and not negative.

    Raises:
        ValueError: some are not; the message continues the tensor's name.
    """
    if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
        raise ValueError("holds a scale that is no finite number of at least 0")


def empty_fp8(runtime: Runtime, *shape: int) -> nn.Parameter:
    """Weights in e4m3, to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=E4M3, device=runtime.device), requires_grad=False)


def empty_scales(runtime: Runtime, *shape: int) -> nn.Parameter:
    """Scales in float32, to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=runtime.device), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class QuantizingPlacement(Placement):
    """A weight in the model's dtype, which is quantised to FP8 on loading."""

    scales: torch.Tensor
    shard: Shard

    @classmethod
    def of(cls, shard: Shard, parameter: torch.Tensor, scales: torch.Tensor) -> QuantizingPlacement:
        """A placement into ``parameter``, with a scale per row in ``scales``."""
        return cls(parameter=parameter, shape=(shard.rows, shard.columns), scales=scales, shard=shard)

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        for first in range(self.shard.my_rows.start, min(self.shard.my_rows.stop, self.shard.rows), _CHUNK):
            if not bool(torch.isfinite(tensor[first : min(first + _CHUNK, self.shard.my_rows.stop)]).all()):
                raise ValueError(NOT_FINITE)

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`; scales belong to whole rows, even if this rank has only some of their columns."""
        shard, begin = self.shard, self.shard.begin
        with torch.no_grad():
            if shard.is_padded:
                self.parameter[begin : begin + len(shard.my_rows)].zero_()
                self.scales[begin : begin + len(shard.my_rows)].zero_()
            for first in range(shard.my_rows.start, min(shard.my_rows.stop, shard.rows), _CHUNK):
                rows = tensor[first : min(first + _CHUNK, shard.my_rows.stop)].to(self.parameter.device)
                scale, end = row_scales(rows), begin + len(rows)
                if not bool(torch.isfinite(scale).all()):
                    raise ValueError(NOT_FINITE)
                mine = rows[:, shard.my_columns.start : shard.my_columns.stop]
                self.parameter[begin:end, : mine.shape[1]].copy_(to_e4m3(mine, scale))
                self.scales[begin:end].copy_(scale[:, 0])
                begin = end

    def store(self, out: torch.Tensor) -> None:
        """See :class:`Placement`; the values are those that FP8 represents."""
        shard = self.shard
        mine = out[shard.my_rows.start : shard.my_rows.stop, shard.my_columns.start : shard.my_columns.stop]
        rows = slice(shard.begin, shard.begin + mine.shape[0])
        mine.copy_(self.parameter[rows, : mine.shape[1]].float() * self.scales[rows, None])
