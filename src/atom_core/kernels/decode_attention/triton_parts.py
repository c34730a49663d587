"""What the kernels in Triton and in Gluon share: the search for a token that is written in the step that reads it."""

from __future__ import annotations

import triton
import triton.language as tl

#: Tokens of the step whose slots are compared at a time.
TOKENS = tl.constexpr(128)


@triton.jit
def searches(newest, PAGE: tl.constexpr, READS: tl.constexpr):
    """Whether a request whose new token is at ``newest`` may read a token that the step writes, not its own."""
    found = newest % PAGE == 0
    if READS == "anywhere":
        found = newest > 0
    return found


@triton.jit
def writers(lane, table, slots, positions, num_tokens, begin, end, PAGE: tl.constexpr):
    """The step's token that fills a page of a request at a position in ``begin .. end - 1``, in its lane, else -1.

    ``lane`` goes over :data:`TOKENS`.
    """
    found = lane * 0 - 1
    for first in range(0, num_tokens, TOKENS):
        token = first + lane
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        place = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.int32)
        fills = (place % PAGE == PAGE - 1) & (place >= begin) & (place < end)
        page = tl.load(table + place // PAGE, mask=fills, other=0)
        found = tl.where(fills & (slot == page.to(tl.int64) * PAGE + PAGE - 1), token, found)
    return found
