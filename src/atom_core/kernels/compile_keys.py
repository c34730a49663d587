"""How a kernel says for which batches it is compiled anew, so that a warm-up compiles all of it.

A compile key is what one launch is compiled for and what depends on the batch: its tile, a power of two, whether 16
divides an integer that Triton specialises. Batches with equal keys share compiled code. A key is best the value that
the launch itself takes from the kernel's table of tiles; keys that tell apart more than the compiler does cost the
warm-up a batch, and nothing else. A kernel that is compiled once for all batches has none of these methods.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol, runtime_checkable

import torch

from atom_core.batch import BatchShape


@runtime_checkable
class CompileKeys(Protocol):
    """A kernel that runs in each batch, whatever requests it has."""

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterable[Hashable]:
        """The compile keys of the kernel's launches for a batch on ``device``."""


class AttentionCompileKeys(Protocol):
    """A token mixer, or one of its kernels; the mixer knows which of them run a batch, and asks those."""

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterable[Hashable]:
        """The compile keys of the launches for a batch on ``device``."""


def attention_keys(kernel: object, shape: BatchShape, device: torch.device) -> list[Hashable]:
    """The keys of one of a mixer's kernels, told apart from those of the others; a kernel without any has one."""
    keys = getattr(kernel, "attention_compile_keys", None)
    return [(id(kernel), key) for key in ((None,) if keys is None else keys(shape, device))]


def specialized(value: int) -> tuple[bool, bool]:
    """What Triton compiles an integer argument for: whether it is 1, and whether 16 divides it."""
    return value == 1, value % 16 == 0
