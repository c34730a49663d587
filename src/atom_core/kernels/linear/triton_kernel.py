"""Products of few rows in Triton, whose time is that of reading the weight once.

:mod:`.one_row` multiplies one row element by element. Several rows are the right operand of a matrix product: up to 64
on Hopper, up to 256 by small weights (:mod:`.few_rows_hopper`), up to 16 elsewhere (:mod:`.few_rows`). The kernel for
Hopper also multiplies one row by weights that it reads faster. torch multiplies more rows.

All kernels can apply a gated activation (gate and up rows alternate) or add to a residual. Those that read whole input
rows can apply an RMS norm, because the norm's factor may be applied to the sums.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.few_rows import FETCHED, LINE, few_rows
from atom_core.kernels.linear.one_row import one_row, one_row_ring
from atom_core.kernels.linear.reference import linear as by_torch
from atom_core.kernels.linear.tiles import MAX_ROWS, MOST_ROWS, Tile, chosen_tile, tile_key, why_no_gluon
from atom_core.kernels.triton_support import cdiv, launch_options
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.kernels.linear import LinearSpec

_KERNELS = {"row": one_row, "ring": one_row_ring, "rows": few_rows}
if why_no_gluon() is None:
    from atom_core.kernels.linear.few_rows_hopper import LAG, few_rows_hopper

    _KERNELS["hopper"] = few_rows_hopper


@dataclass(frozen=True)
class Norm:
    """An RMS norm of the input."""

    weight: torch.Tensor
    eps: float


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
    overlap: bool,
    scales: torch.Tensor | None = None,
    input_scales: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``act(norm(input_scales x) (scales W)^T + b) + residual``, for a number of rows that has a tile.

    Args:
        x: ``[M, K]`` in bfloat16, float16 or FP8.
        weight: ``[N, K]`` in the same dtype.
        bias: ``[N]``.
        tile: see :func:`chosen_tile`.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        scales: float32 ``[N]``, of the weight's rows.
        input_scales: float32 ``[M]``, with FP8.
        norm: the RMS norm to apply to ``x`` first; only where ``tile.norms``.
        activation: the weight is ``[gate | up]``; the result is ``[M, N / 2]``.
        residual: contiguous, of the result's shape; it is added to and returned.
        dtype: the result's; None: that of ``x``.
    """
    num_rows = x.shape[0]
    assert 0 < num_rows <= (MOST_ROWS if tile.tokens else MAX_ROWS)
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    assert norm is None or tile.norms
    assert residual is None or residual.is_contiguous()
    if activation is not None and tile.split > 1:
        # A thread must have both gate and up to activate them, and with splits it does not.
        tile = replace(tile, rows=tile.rows * tile.split, split=1)
    out_features, in_features = weight.shape
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(num_rows, outputs, dtype=dtype) if residual is None else residual
    choices: dict[str, object] = {}
    input_blocks = 1
    if tile.kernel == "row":
        choices = {"FETCH": tile.fetched(weight, overlap)}
    if tile.kernel == "ring":
        choices = {"STAGES": tile.stages}
    if tile.kernel == "rows":
        choices = {"BLOCK_M": tile.input_rows(num_rows), "STAGES": tile.stages, "LINE": LINE}
        choices["FETCH"] = FETCHED if overlap and in_features * weight.itemsize >= FETCHED * LINE else 0
    if tile.kernel == "hopper":
        taken = tile.input_rows(num_rows)
        choices = {"BLOCK_M": taken, "LAG": LAG, "SPLIT_INPUT": tile.tokens > 0, "SPLIT": tile.split}
        input_blocks = cdiv(num_rows, taken)
        choices["STAGES"] = min(tile.stages, in_features // (tile.split * tile.columns) + LAG)
    _KERNELS[tile.kernel][(cdiv(outputs, tile.rows if activation is None else tile.rows // 2), input_blocks)](
        x,
        input_scales,
        None if norm is None else norm.weight,
        weight,
        scales,
        bias,
        residual,
        y,
        0.0 if norm is None else norm.eps,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        EVEN=in_features % (tile.split * tile.columns) == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        EARLY=tile.early,
        num_warps=tile.warps,
        **choices,
        **launch_options(overlap),
    )
    return y


class TritonLinear:
    """See :mod:`atom_core.kernels.linear`.

    Args:
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        float32_result: whether the result is in float32.
        spec: the product, for :meth:`compile_keys`.
    """

    def __init__(
        self, nvidia: bool, overlap: bool, float32_result: bool = False, spec: LinearSpec | None = None
    ) -> None:
        self.nvidia, self.overlap, self.float32_result, self.spec = nvidia, overlap, float32_result, spec

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`; a norm or an activation has the same tiles."""
        spec = self.spec
        assert spec is not None
        num_rows = shape.num_requests if spec.few_rows else shape.num_tokens
        yield tile_key(num_rows, spec.out_features, spec.in_features, spec.dtype, self.nvidia, device)

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Weights stay as they are."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        return linear(x, weight, bias, self.nvidia, self.overlap, self.float32_result)

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.linear.AddingLinearKernel`; torch computes products of many rows."""
        tile = chosen_tile(x, weight, self.nvidia)
        if tile is None:
            residual.addmm_(x, weight.t())
            return residual if bias is None else residual.add_(bias)
        return product(x, weight, bias, tile=tile, overlap=self.overlap, residual=residual)


def many_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float32_result: bool, nvidia: bool
) -> torch.Tensor:
    """``x W^T + b`` by torch; only on NVIDIA GPUs it gives float32 results without converting the operands."""
    if not (float32_result and nvidia) or x.device.type == "cpu":
        return by_torch(x, weight, bias, float32_result)
    y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return y if bias is None else y.add_(bias)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
    float32_result: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32 if float32_result else x.dtype)


@custom_op("linear", _fake)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    nvidia: bool,
    overlap: bool,
    float32_result: bool,
) -> torch.Tensor:
    """``x W^T + b``; torch computes products of many rows."""
    tile = chosen_tile(x, weight, nvidia)
    if tile is None:
        return many_rows(x, weight, bias, float32_result, nvidia)
    dtype = torch.float32 if float32_result else None
    return product(x, weight, bias, tile=tile, overlap=overlap, dtype=dtype)
