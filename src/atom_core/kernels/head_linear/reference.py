"""A product for each head in torch: the vendor's batched product on a GPU."""

from __future__ import annotations

import torch


def head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See :mod:`atom_core.kernels.head_linear`."""
    _, K, N = weight.shape
    out[..., :N] = torch.bmm(x[..., :K].transpose(0, 1), weight).transpose(0, 1)
    out[..., N:] = x[..., K:]


def widened_head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same in float32, rounded once, for CPUs that multiply 16-bit values one by one."""
    head_linear(x.float(), weight.float(), out)
