"""The all-reduce of a row-parallel product, the addition to the residual stream and the next norm, in one launch.

    s = residual + sum over ranks of x
    y = s / sqrt(mean(s^2) + eps) * weight

``x``: ``[T, N]``, each rank's partial sum; ``residual``: ``[T, N]`` of the same dtype, equal on all ranks; ``weight``:
``[N]`` in that dtype or float32. Both results are ``[T, N]``, and bit-identical on all ranks. Sums are float32 and
rounded once; the separate ops round the all-reduce too. It is for few tokens: each rank reads the rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import why_no_triton

if TYPE_CHECKING:
    from atom_core.runtime import Communicator

#: The most bytes of a row: it has to fit in a program's share of the peer memory and, on AMD, in its registers.
MAX_ROW = {"cuda": 32 * 1024, "rocm": 16 * 1024}
MAX_RANKS = 8


@dataclass(frozen=True)
class AllReduceNormSpec:
    """One norm after an all-reduce: its width and dtype, and the group of the all-reduce."""

    size: int
    dtype: torch.dtype
    group: Communicator
    float32_weight: bool = False
    """See :class:`atom_core.kernels.rms_norm.RmsNormSpec`."""


class AllReduceNormKernel(Protocol):
    """The call: ``(x, residual, weight, eps)`` to ``(y, s)``. Both inputs may be written to."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it can run this call; equal on all ranks of a group. Otherwise the separate ops run."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@runtime_checkable
class QuantizingAllReduceNorm(Protocol):
    """An :class:`AllReduceNormKernel` that can quantise ``y`` for the next FP8 product in the same launch."""

    def quantizes(self, x: torch.Tensor, form: InputForm) -> bool:
        """Whether :meth:`quantized` can run for an ``x`` that the kernel takes; equal on all ranks."""

    def quantized(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: InputForm
    ) -> tuple[QuantizedInput, torch.Tensor]:
        """The call with ``y`` in ``form``, without rounding to 16 bits first. Both inputs may be written to."""


def _triton_supports(spec: AllReduceNormSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if target.kind == "rocm" and target.arch not in ("gfx942", "gfx950"):
        return f"The Triton kernel's cache write-back is for gfx942 and gfx950, not for {target.arch}."
    if not 2 <= spec.group.world_size <= MAX_RANKS:
        return f"The Triton kernel is for 2 to {MAX_RANKS} ranks, not {spec.group.world_size}."
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"The Triton kernel is for bfloat16 and float16, not for {spec.dtype}."
    if spec.size * spec.dtype.itemsize > MAX_ROW[target.kind]:
        return f"The Triton kernel has rows of up to {MAX_ROW[target.kind] // spec.dtype.itemsize} elements."
    return spec.group.why_no_peer_memory()


def _build_triton(spec: AllReduceNormSpec, target: Target) -> AllReduceNormKernel:
    from atom_core.kernels.all_reduce_norm.triton_kernel import OneShot  # needs triton, which a CPU may lack

    return OneShot(spec.group.peer_memory, spec.group.world_size, nvidia=target.kind == "cuda")


#: "separate" is no kernel: the layer runs the single ops. An adapter contributes the framework's fused kernel.
ALL_REDUCE_NORM: Op[AllReduceNormSpec, AllReduceNormKernel | None] = Op(
    "all_reduce_norm",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
