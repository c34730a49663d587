"""Products with MXFP4 weights on a GPU: one launch applies the norm and reorders the input. :mod:`.few_rows` multiplies
up to 64 rows, :mod:`.many_rows` more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_linear.few_rows import input_rows, multiply_few_rows
from atom_core.kernels.mxfp4_linear.inputs import prepare
from atom_core.kernels.mxfp4_linear.many_rows import multiply_many_rows
from atom_core.kernels.mxfp4_linear.many_rows import tile_for as tile_for_many
from atom_core.types import Activation


class TritonMxfp4Linear:
    """See the module.

    Args:
        rounded_inputs: round inputs to MXFP4.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    max_rows = MAX_ROWS

    def __init__(self, rounded_inputs: bool, *, nvidia: bool, overlap: bool) -> None:
        self.rounded_inputs, self.nvidia, self.overlap = rounded_inputs, nvidia, overlap

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        num_rows = shape.num_tokens
        yield input_rows(num_rows) if num_rows <= MAX_ROWS else tile_for_many(num_rows, self.nvidia)

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Weights stay as they are."""

    def add(
        self,
        x: torch.Tensor,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.mxfp4_linear.FewRowsMxfp4Kernel`."""
        return multiply_few(
            x,
            blocks,
            scales,
            bias,
            rounded_inputs=self.rounded_inputs,
            nvidia=self.nvidia,
            overlap=self.overlap,
            residual=residual,
        )

    def __call__(
        self, x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        return mxfp4_linear(x, blocks, scales, bias, self.rounded_inputs, self.nvidia, self.overlap)


def _fake(
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    rounded_inputs: bool,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], blocks.shape[0])


@custom_op("mxfp4_linear", _fake)
def mxfp4_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    rounded_inputs: bool,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """``x W^T + b``."""
    if 0 < len(x) <= MAX_ROWS:
        return multiply_few(x, blocks, scales, bias, rounded_inputs=rounded_inputs, nvidia=nvidia, overlap=overlap)
    if not len(x):
        return x.new_empty(0, len(blocks))
    return multiply_many_rows(prepare(x, overlap, rounds=rounded_inputs), blocks, scales, bias, nvidia=nvidia)


def multiply_few(
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rounded_inputs: bool,
    nvidia: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) W^T + b) + residual`` for 1 to :data:`MAX_ROWS` rows of the model's dtype."""
    return multiply_few_rows(
        prepare(x, overlap, rounds=rounded_inputs, norm=norm),
        blocks,
        scales,
        bias,
        nvidia=nvidia,
        overlap=overlap,
        activation=activation,
        residual=residual,
    )
