"""aiter's all-reduce over a group of processes, with what stands behind it in the same kernel.

Of a row, each rank's part is added up in float32, in the order of the ranks, and rounded to the parts' dtype. The
residual is added to that in float32; what goes back is rounded, and what is normed is not (``ar_fusion_epilogue`` and
the kernels of one stage in csrc/include/custom_all_reduce.cuh).
"""

import torch
from aiter import dtypes
from aiter._recorded import real_method
from torch import distributed

#: Programs of a launch, and threads of one, each of which has 16 bytes of a row.
PROGRAMS, THREADS, WAVE = 80, 1024, 64


class CustomAllreduce:
    """Each method does the same on all ranks."""

    def __init__(self, group, device, max_size=1024 * 1024 * 1024, enable_register_for_capturing=True):
        assert distributed.get_backend(group) != "nccl"
        self.group, self.device = group, device
        self.world_size = distributed.get_world_size(group)
        assert self.world_size in (2, 4, 6, 8)
        self.disabled, self.fully_connected = False, True
        self.enable_register_for_capturing = enable_register_for_capturing
        self.max_size = max_size
        #: By this vLLM tells an aiter whose kernels take rows of any size.
        self._pool = {}
        #: (method, whether it was asked for in one kernel) of each call.
        self.calls = []

    @real_method("CustomAllreduce.should_custom_ar")
    def should_custom_ar(self, inp, prefill_support=False):
        size = inp.numel() * inp.element_size()
        return size % 16 == 0 and 0 < size <= self.max_size and inp.is_contiguous()

    @real_method("CustomAllreduce.custom_fused_ar_rms")
    def custom_fused_ar_rms(self, input, residual_inp, weight, eps, use_1stage, out_hidden_dim=0, gemma_norm=False):
        assert (out_hidden_dim, gemma_norm) == (0, False)
        if not self.should_custom_ar(input):
            return None
        self.calls.append(("custom_fused_ar_rms", use_1stage))
        normed, summed = self._normed(input, residual_inp, weight, eps, use_1stage)
        return normed.to(input.dtype), summed

    @real_method("CustomAllreduce.custom_fused_ar_rms_per_group_quant")
    def custom_fused_ar_rms_per_group_quant(
        self,
        input,
        residual_inp,
        weight,
        eps,
        group_size=128,
        use_1stage=False,
        emit_bf16=False,
        transpose_scale=False,
    ):
        """The norm is not rounded before it is quantised."""
        assert not emit_bf16
        if not self.should_custom_ar(input):
            return None
        rows, size = input.shape
        threads = group_size // 8
        assert group_size % 8 == 0
        assert threads in (1, 2, 4, 8, 16, 32, WAVE), "it throws"
        assert size % group_size == 0, "it throws"
        self.calls.append(("custom_fused_ar_rms_per_group_quant", use_1stage))
        normed, summed = self._normed(input, residual_inp, weight, eps, use_1stage)
        groups = normed.view(rows, -1, group_size)
        largest = groups.abs().amax(-1)
        scales = torch.where(largest == 0, 1.0, largest / torch.finfo(dtypes.fp8).max)
        values = (groups / scales[..., None]).view(rows, size).to(dtypes.fp8)
        # Either way the shape is [rows, groups]; transposed, those of one group are side by side.
        return values, summed, scales.t().contiguous().t() if transpose_scale else scales

    def _normed(self, x, residual, weight, eps, use_1stage):
        rows, size = x.shape
        assert self.world_size in (2, 4, 8), "it throws"
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.dtype == residual.dtype == weight.dtype
        assert (residual.shape, weight.shape) == (x.shape, (size,))
        assert residual.is_contiguous()
        assert weight.is_contiguous()
        assert size % 8 == 0
        assert size // 8 <= THREADS
        assert use_1stage, "two kernels are not asked for"
        assert rows <= PROGRAMS, "not one kernel's"
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        distributed.all_gather(parts, x, group=self.group)
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        total = total.to(x.dtype).float() + residual.float()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()
        return normed, total.to(x.dtype)
