"""aiter's fused all-reduce and norm, by the method of SGLang's group that SGLang's own norms call.

SGLang owns the communicator and registers its memory with each captured graph. On AMD the communicator is aiter's
unless ``SGLANG_USE_AITER_AR=0`` is set.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch

from atom_core.kernels.all_reduce_norm import AllReduceNormSpec
from atom_core.kernels.select import Implementation, Target
from atom_plugin.common.aiter_all_reduce import KIB, GroupQuantizer, is_one_kernel, why_not_aiter

#: The largest tensor, in bytes, for which SGLang uses one kernel (GroupCoordinator.fused_allreduce_rmsnorm).
MAX_BYTES = 128 * KIB


def aiter_all_reduce_norm(group: Any) -> Implementation[Hashable, object]:
    """The implementation over SGLang's tensor-parallel ``group``, which replaces the core's."""

    def why_not_here(spec: AllReduceNormSpec, target: Target) -> str | None:
        if reason := why_not_aiter(spec, target):
            return reason
        if group.ca_comm is None or group.ca_comm.disabled:
            return "SGLang's custom all-reduce is off: --disable-custom-all-reduce, or ranks on several hosts."
        if not hasattr(group.ca_comm, "custom_fused_ar_rms"):
            return "SGLang's all-reduce is not aiter's: SGLANG_USE_AITER_AR=0 or deterministic inference."
        return None

    it = Implementation("aiter", why_not_here, lambda spec, target: AiterAllReduceNorm(group, target))
    return cast("Implementation[Hashable, object]", it)


class AiterAllReduceNorm(GroupQuantizer):
    """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`; inputs are not modified."""

    def __init__(self, group: Any, target: Target) -> None:
        super().__init__(group.ca_comm, target.arch)
        self.group = group

    def takes(self, x: torch.Tensor) -> bool:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        if x.numel() * x.itemsize > MAX_BYTES or not x.is_contiguous():
            return False
        return is_one_kernel(x.shape, x.dtype, self.group.world_size) and self.group.ca_comm.should_custom_ar(x)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        found = self.group.fused_allreduce_rmsnorm(x, residual, weight, eps)
        assert found is not None, "aiter's communicator has taken a tensor of this size"
        normed, summed = found
        return normed, summed
