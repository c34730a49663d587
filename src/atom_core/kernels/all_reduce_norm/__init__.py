"""The sum of a row-parallel product over ranks, added to the residual stream, and the norm behind it, in one launch.

    s = residual + sum over ranks of x
    y = s / sqrt(mean(s^2) + eps) * weight

``x``: ``[T, N]``, each rank's own; ``residual``: ``[T, N]`` of the same dtype, alike on all ranks; ``weight``: ``[N]``.
Both results are ``[T, N]``, and bit for bit alike on all ranks. Sums are float32 and rounded once, where the ops that
this is made of round the sum over ranks as well. It is for few tokens: each rank reads what all have.
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

#: Rows of so many bytes: what fits a program's share of the ranks' memory, and on AMD's GPUs its registers.
MAX_ROW = {"cuda": 32 * 1024, "rocm": 16 * 1024}
MAX_RANKS = 8


@dataclass(frozen=True)
class AllReduceNormSpec:
    """One norm behind a sum over ranks: its width and dtype, and the group that sums."""

    size: int
    dtype: torch.dtype
    group: Communicator


class AllReduceNormKernel(Protocol):
    """The call: ``(x, residual, weight, eps)`` to ``(y, s)``. Both inputs may be written to."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it is to be called; all ranks of a group answer alike. Else each op runs by itself."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@runtime_checkable
class QuantizingAllReduceNorm(Protocol):
    """An :class:`AllReduceNormKernel` that can quantise ``y`` for the FP8 product behind it in the same launch."""

    def quantizes(self, x: torch.Tensor, form: InputForm) -> bool:
        """Whether :meth:`quantized` has ``x``, which :meth:`AllReduceNormKernel.takes` has; all ranks answer alike."""

    def quantized(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: InputForm
    ) -> tuple[QuantizedInput, torch.Tensor]:
        """The call with ``y`` in ``form``, not rounded to 16 bits before. Both inputs may be written to."""


def _triton_supports(spec: AllReduceNormSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if target.kind == "rocm" and target.arch not in ("gfx942", "gfx950"):
        return f"The Triton kernel writes caches back as on gfx942 and gfx950, not as on {target.arch}."
    if not 2 <= spec.group.world_size <= MAX_RANKS:
        return f"The Triton kernel is for 2 to {MAX_RANKS} ranks, not {spec.group.world_size}."
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"The Triton kernel exchanges numbers of two bytes, not {spec.dtype}."
    if spec.size * spec.dtype.itemsize > MAX_ROW[target.kind]:
        return f"The Triton kernel holds rows of up to {MAX_ROW[target.kind] // spec.dtype.itemsize} numbers."
    return spec.group.why_no_peer_memory()


def _build_triton(spec: AllReduceNormSpec, target: Target) -> AllReduceNormKernel:
    from atom_core.kernels.all_reduce_norm.triton_kernel import OneShot  # needs triton, which a CPU may lack

    return OneShot(spec.group.peer_memory, spec.group.world_size, nvidia=target.kind == "cuda")


#: "separate" is no kernel: the layer runs each op by itself. An adapter contributes what its framework's group fuses.
ALL_REDUCE_NORM: Op[AllReduceNormSpec, AllReduceNormKernel | None] = Op(
    "all_reduce_norm",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
