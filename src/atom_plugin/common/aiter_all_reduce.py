"""aiter's fused all-reduce and norm: for which calls it is one kernel.

The same kernel can quantise its output for an FP8 product; see :class:`GroupQuantizer`.

The frameworks own aiter's communicator, its memory and its graphs, and our models call it through them. For more tokens
aiter splits the call into two kernels. vLLM's rule (aiter_custom_all_reduce.py:76) then uses a separate all-reduce and
norm as the faster way; this has not been measured here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from atom_core.kernels.aiter_library import FP8, why_no_aiter
from atom_core.kernels.all_reduce_norm import AllReduceNormSpec
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.rms_norm import FLOAT32_WEIGHT
from atom_core.kernels.select import Target

#: One block a token; all blocks must be resident on the GPU.
MAX_TOKENS = 80
#: Packs of 16 bytes of a row, one a thread.
MAX_PACKS = 1024
KIB = 1024
#: Elements that share a scale. Threads of one wave reduce them, with eight elements each.
GROUPS = (8, 16, 32, 64, 128, 256, 512)


def why_not_aiter(spec: AllReduceNormSpec, target: Target) -> str | None:
    """Why aiter never has one kernel here; None if it has one for some calls."""
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's all-reduce and norm is for bfloat16 and float16, not for {spec.dtype}."
    if spec.float32_weight:
        return FLOAT32_WEIGHT
    if spec.group.world_size not in (2, 4, 8):
        return f"aiter's all-reduce and norm is for 2, 4 or 8 ranks, not {spec.group.world_size}."
    if not is_one_kernel((1, spec.size), spec.dtype, spec.group.world_size):
        return f"aiter's all-reduce and norm is one kernel for rows of up to {8 * MAX_PACKS} elements, in eights."
    return None


def is_one_kernel(shape: Sequence[int], dtype: torch.dtype, world_size: int) -> bool:
    """Whether one kernel sums and norms a tensor of shape ``[tokens, size]``."""
    tokens, size = shape
    if not 0 < tokens <= MAX_TOKENS or size % (16 // dtype.itemsize) or size * dtype.itemsize > 16 * MAX_PACKS:
        return False
    total = tokens * size * dtype.itemsize
    return world_size == 2 or total < (256 if world_size <= 4 else 128) * KIB


def quantizes(size: int, form: InputForm, arch: str) -> bool:
    """Whether aiter's kernel also quantises rows of ``size`` elements to ``form``."""
    return form.dtype == FP8[arch] and form.group in GROUPS and size % form.group == 0


class GroupQuantizer:
    """aiter's sum, norm and group-wise quantisation in one kernel.

    It implements :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm`. Partial sums are added in float32
    in the order of ranks and rounded to their dtype; the residual is added in float32. Only the residual output is
    rounded: the norm and the quantiser read the float32 sum. The scale of a group is its largest magnitude divided by
    the largest e4m3 value of the GPU (240 on gfx942, 448 on gfx950), or 1 if all elements are zero. Elements are
    divided by the scale (csrc/include/custom_all_reduce.cuh:1862 and :2066 at e4048607).

    We call aiter's own method, as SGLang's group does on gfx950 only. vLLM's op
    ``rocm_aiter_fused_allreduce_rmsnorm_quant_per_group`` has no argument for the order of the scales. If aiter's
    method has none either, as in 0.1.16 and 0.1.19, only one token is quantised, for which both orders are the same.
    aiter before 0.1.14 has no such method, and nothing is quantised.

    Args:
        communicator: aiter's, owned by the framework.
        arch: of the GPU.
    """

    def __init__(self, communicator: Any, arch: str) -> None:
        self.arch = arch
        self.fused_with_quantizer = getattr(communicator, "custom_fused_ar_rms_per_group_quant", None)
        self.transposes = self.fused_with_quantizer is not None and (
            "transpose_scale" in inspect.signature(self.fused_with_quantizer).parameters
        )

    def quantizes(self, x: torch.Tensor, form: InputForm) -> bool:
        """See :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm`."""
        if self.fused_with_quantizer is None or not (self.transposes or len(x) == 1):
            return False
        return quantizes(x.shape[1], form, self.arch)

    def quantized(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: InputForm
    ) -> tuple[QuantizedInput, torch.Tensor]:
        """See :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm`; inputs are not modified."""
        assert self.fused_with_quantizer is not None
        order = {"transpose_scale": True} if len(x) > 1 else {}
        found = self.fused_with_quantizer(x, residual, weight, eps, group_size=form.group, use_1stage=True, **order)
        assert found is not None, "aiter's communicator has taken a tensor of this size"
        values, summed, scales = found
        return QuantizedInput(values, scales.t()), summed
