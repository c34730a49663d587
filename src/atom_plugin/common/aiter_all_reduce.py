"""aiter's all-reduce with the norm behind it: which calls of it are one kernel, and with that quicker than two ops.

Frameworks hold aiter's communicator and decide its memory and its graphs; our models call it through them alone. For
more tokens aiter splits the call in two kernels, the sum's and the norm's. vLLM, whose rule this is
(aiter_custom_all_reduce.py:76), finds that slower than an all-reduce and a norm; neither has been measured here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.all_reduce_norm import AllReduceNormSpec
from atom_core.kernels.select import Target

#: A block each, all of which are on the GPU at once.
MAX_TOKENS = 80
#: Of 16 bytes, a thread each.
MAX_PACKS = 1024
KIB = 1024


def why_not_aiter(spec: AllReduceNormSpec, target: Target) -> str | None:
    """None where aiter has one kernel for some calls, else the reason."""
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's all-reduce and norm is for numbers of two bytes, not for {spec.dtype}."
    if spec.group.world_size not in (2, 4, 8):
        return f"aiter's all-reduce and norm is for 2, 4 or 8 ranks, not {spec.group.world_size}."
    if not is_one_kernel((1, spec.size), spec.dtype, spec.group.world_size):
        return f"aiter's all-reduce and norm is one kernel for rows of up to {8 * MAX_PACKS} numbers, by eights."
    return None


def is_one_kernel(shape: Sequence[int], dtype: torch.dtype, world_size: int) -> bool:
    """Whether ``[tokens, size]`` numbers are summed and normed in one kernel."""
    tokens, size = shape
    if not 0 < tokens <= MAX_TOKENS or size % (16 // dtype.itemsize) or size * dtype.itemsize > 16 * MAX_PACKS:
        return False
    total = tokens * size * dtype.itemsize
    return world_size == 2 or total < (256 if world_size <= 4 else 128) * KIB
