"""Kernels that torch.compile must not look into: called straight through, but one op of torch's while it traces.

Branches on a batch's size would be frozen by tracing, and launches of Triton kernels need no compiler around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def opaque(
    name: str, fake: Callable[P, R], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that launches kernels.

    Args:
        name: of the op, ``atom::name``.
        fake: the same call on tensors without data; it returns what the function would, in shape and dtype.
        mutates: parameters that are written to. What is returned may be none of the parameters.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(f"atom::{name}", function, mutates_args=mutates)
        op.register_fake(fake)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return op(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

        return call

    return decorate
