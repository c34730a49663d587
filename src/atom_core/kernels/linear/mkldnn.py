"""The product on a CPU with a weight that oneDNN packs once, through torch's bindings."""

from __future__ import annotations

import torch

from atom_core.kernels.select import Target

#: Rows that oneDNN packs for: a decode batch. Prefills are as fast with the same packing.
_ROWS = 16


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies ``dtype`` (bfloat16 or float16) on this processor."""
    if not torch._C._has_mkldnn:
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def why_no_packing(dtype: torch.dtype, target: Target) -> str | None:
    """None where packing pays off, else the reason."""
    if target.kind != "cpu" or not torch._C._has_mkldnn:
        return "oneDNN's packed weights are for CPUs that it knows."
    if dtype != torch.bfloat16:
        return f"Packing pays for bfloat16, not for {dtype}."
    if not multiplies(dtype):
        return "oneDNN multiplies bfloat16 on processors with AVX-512 or AVX-NE-CONVERT, and this one has neither."
    return None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight [N, K]`` in oneDNN's packed form."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x W^T + b``."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


class MkldnnLinear:
    """See :class:`atom_core.kernels.linear.LinearKernel`."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Store the packed weight only."""
        self._packed = pack(weight)
        return True

    def unpacked(self) -> torch.Tensor:
        """See :class:`atom_core.kernels.linear.PackingLinearKernel`."""
        return self._packed.to_dense()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        return packed_linear(x, self._packed, bias)
