"""What attention kernels in Triton and in Gluon share."""

from __future__ import annotations

import triton
import triton.language as tl

#: Softmaxes use powers of 2, for which the hardware has an instruction.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def range_of(block, starts, num_ranges, BLOCK_Q: tl.constexpr):
    """The range (request or piece) whose queries program ``block`` takes; range ``i`` begins at token ``starts[i]``.

    Each range has its own programs, up to one more than it needs.
    """
    low = 0
    high = num_ranges
    while low < high:
        mid = (low + high) // 2
        if tl.load(starts + mid) // BLOCK_Q + mid <= block:
            low = mid + 1
        else:
            high = mid
    return low - 1
