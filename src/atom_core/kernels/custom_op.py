"""Functions that launch kernels: torch.compile sees each as one custom op, other callers call it directly.

torch.compile would freeze the function's branches on the batch size while it traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def custom_op(
    name: str, fake: Callable[P, R], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that launches kernels.

    Args:
        name: the op is ``atom::name``.
        fake: the same call on tensors without data; its results have the function's shapes and dtypes.
        mutates: the parameters that the function writes to. It may not return any of its parameters.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(f"atom::{name}", function, mutates_args=mutates)
        op.register_fake(fake)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return op(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

        return call

    return decorate
