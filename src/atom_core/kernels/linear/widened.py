"""The product of 16-bit values in float32, on CPUs without instructions for 16 bits.

torch multiplies such values one by one there, which takes eight times as long as vectorised float32. The part of the
weight that is converted at a time fits in the caches, so the weight is read from memory once, in 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.linear.mkldnn import multiplies
from atom_core.kernels.select import Target

#: With fewer rows, reading the weight dominates, and torch's own product is as fast.
_FEWEST_ROWS = 4
#: Elements of the weight that are converted at a time.
_AT_ONCE = 256 * 1024


def why_not_widened(dtype: torch.dtype, target: Target) -> str | None:
    """None where it pays off, else the reason."""
    if target.kind != "cpu":
        return "Products are widened on CPUs alone."
    if dtype not in (torch.bfloat16, torch.float16):
        return f"Numbers of two bytes are widened, not {dtype}."
    if multiplies(dtype):
        return f"This processor multiplies {dtype}."
    return None


@custom_op("widened_linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))
def widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x W^T + b``, summed in float32 and rounded once."""
    if len(x) < _FEWEST_ROWS:
        return F.linear(x, weight, bias)
    out_features, in_features = weight.shape
    wide = x.float()
    y = wide.new_empty(len(x), out_features)
    step = max(16, _AT_ONCE // max(1, in_features))
    for begin in range(0, out_features, step):
        torch.mm(wide, weight[begin : begin + step].float().t(), out=y[:, begin : begin + step])
    if bias is not None:
        y += bias
    return y.to(x.dtype)


class WidenedLinear:
    """See :class:`atom_core.kernels.linear.LinearKernel`."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Weights stay as they are."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        y: torch.Tensor = widened_linear(x, weight, bias)
        return y
