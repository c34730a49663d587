"""The product on a CPU over a weight that oneDNN has packed once, through torch's own binding of it."""

from __future__ import annotations

import torch

#: Rows that oneDNN packs for: a decoding batch. Prefills read the same blocks as fast.
_ROWS = 16


class MkldnnLinear:
    """See :class:`atom_core.kernels.linear.LinearKernel`."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Keep the packed weight alone."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        return True

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return result
