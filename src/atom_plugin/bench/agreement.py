"""Whether contenders compute the same: no time is given of one that does not."""

from __future__ import annotations

import math

import torch

#: Tolerated difference from torch's or float32's values, as a share of their largest magnitude.
TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11, torch.float32: 1e-3}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest expected magnitude; infinite if some value is not finite."""
    largest = (found - expected).abs().max() / expected.abs().max()
    return float(largest) if bool(largest.isfinite()) else math.inf
