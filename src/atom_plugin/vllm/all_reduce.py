"""aiter's fused all-reduce and norm over vLLM's tensor-parallel group, by the op that vLLM's own models call.

vLLM owns the communicator (``aiter_ar_comm`` of the group). It makes it if ``VLLM_ROCM_USE_AITER=1`` is set, and
registers its memory with each captured graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

import torch
from vllm._aiter_ops import rocm_aiter_ops

from atom_core.kernels.all_reduce_norm import AllReduceNormSpec
from atom_core.kernels.select import Implementation, Target
from atom_plugin.common.aiter_all_reduce import GroupQuantizer, why_not_aiter


def aiter_all_reduce_norm() -> Implementation[Hashable, object]:
    """The implementation that replaces the core's."""
    it = Implementation("aiter", why_not_here, lambda spec, target: AiterAllReduceNorm(target))
    return cast("Implementation[Hashable, object]", it)


def why_not_here(spec: AllReduceNormSpec, target: Target) -> str | None:
    """Why vLLM does not have it for this group; None if it does."""
    if reason := why_not_aiter(spec, target):
        return reason
    if not rocm_aiter_ops.is_custom_all_reduce_enabled():
        return "vLLM uses aiter's all-reduce if VLLM_ROCM_USE_AITER=1 and VLLM_ROCM_USE_AITER_CUSTOM_AR is not 0."
    communicator = rocm_aiter_ops.get_aiter_allreduce()
    if communicator is None or communicator.disabled:
        return (
            "vLLM has no aiter all-reduce for these ranks: they are on several hosts, or --disable-custom-all-reduce "
            "or VLLM_BATCH_INVARIANT=1 is set."
        )
    if not communicator.supports_dynamic_hidden_dim:
        return "The installed aiter has this kernel for few hidden sizes only; aiter 0.1.12 and later take others."
    return None


class AiterAllReduceNorm(GroupQuantizer):
    """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`; inputs are not modified."""

    def __init__(self, target: Target) -> None:
        self.communicator = rocm_aiter_ops.get_aiter_allreduce()
        super().__init__(self.communicator.aiter_ca, target.arch)
        self.fused = rocm_aiter_ops.get_fused_allreduce_rmsnorm_op()

    def takes(self, x: torch.Tensor) -> bool:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        if not len(x) or not x.is_contiguous():
            return False
        return self.communicator.use_1stage_fused_ar_rms(x) and self.communicator.should_custom_ar(x)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        normed, summed = self.fused(input_=x, residual=residual, weight=weight, epsilon=eps)
        return normed, summed
