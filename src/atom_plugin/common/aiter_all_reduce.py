"""aiter's all-reduce with the norm behind it: which calls of it are one kernel, and with that quicker than two ops.

The same kernel can quantise what it norms for an FP8 product: see :class:`GroupQuantizer`.

Frameworks hold aiter's communicator and decide its memory and its graphs; our models call it through them alone. For
more tokens aiter splits the call in two kernels, the sum's and the norm's. vLLM, whose rule this is
(aiter_custom_all_reduce.py:76), finds that slower than an all-reduce and a norm; neither has been measured here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from atom_core.kernels.aiter_library import FP8, why_no_aiter
from atom_core.kernels.all_reduce_norm import AllReduceNormSpec
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.select import Target

#: A block each, all of which are on the GPU at once.
MAX_TOKENS = 80
#: Of 16 bytes, a thread each.
MAX_PACKS = 1024
KIB = 1024
#: Numbers that share a scale: threads of one wave, eight numbers each, find the largest by halves.
GROUPS = (8, 16, 32, 64, 128, 256, 512)


def why_not_aiter(spec: AllReduceNormSpec, target: Target) -> str | None:
    """None where aiter has one kernel for some calls, else the reason."""
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's all-reduce and norm is for numbers of two bytes, not for {spec.dtype}."
    if spec.group.world_size not in (2, 4, 8):
        return f"aiter's all-reduce and norm is for 2, 4 or 8 ranks, not {spec.group.world_size}."
    if not is_one_kernel((1, spec.size), spec.dtype, spec.group.world_size):
        return f"aiter's all-reduce and norm is one kernel for rows of up to {8 * MAX_PACKS} numbers, by eights."
    return None


def is_one_kernel(shape: Sequence[int], dtype: torch.dtype, world_size: int) -> bool:
    """Whether ``[tokens, size]`` numbers are summed and normed in one kernel."""
    tokens, size = shape
    if not 0 < tokens <= MAX_TOKENS or size % (16 // dtype.itemsize) or size * dtype.itemsize > 16 * MAX_PACKS:
        return False
    total = tokens * size * dtype.itemsize
    return world_size == 2 or total < (256 if world_size <= 4 else 128) * KIB


def quantizes(size: int, form: InputForm, arch: str) -> bool:
    """Whether aiter quantises rows of ``size`` numbers in ``form`` in the kernel that sums and norms them."""
    return form.dtype == FP8[arch] and form.group in GROUPS and size % form.group == 0


class GroupQuantizer:
    """aiter's sum, norm and quantiser of groups in one kernel.

    It is what :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm` adds to a kernel. Parts are added up
    in float32 in the order of the ranks and rounded to their dtype, and the residual is added in float32. That sum is
    rounded for the stream alone: neither what is normed nor what is quantised is. A group's scale is its largest
    magnitude over the largest that the GPU's e4m3 holds (240 on gfx942, 448 on gfx950), 1 where all are zeros, and
    numbers are divided by it (csrc/include/custom_all_reduce.cuh:1862 and :2066 at e4048607).

    It is called by aiter's own method, which SGLang's group calls too, but on gfx950 alone; vLLM's op
    ``rocm_aiter_fused_allreduce_rmsnorm_quant_per_group`` has no word for the order of the scales. An aiter
    whose method has none either, as in 0.1.16 and 0.1.19, quantises one token, of which both orders are the same bytes.
    Before 0.1.14 there is no such method, and nothing is quantised here.

    Args:
        communicator: aiter's, which the framework holds.
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
        """See :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm`; inputs are left alone."""
        assert self.fused_with_quantizer is not None
        order = {"transpose_scale": True} if len(x) > 1 else {}
        found = self.fused_with_quantizer(x, residual, weight, eps, group_size=form.group, use_1stage=True, **order)
        assert found is not None, "aiter's communicator has taken a tensor of this size"
        values, summed, scales = found
        return QuantizedInput(values, scales.t()), summed
