"""Triton's interpreter without what it does over and over, for tests that run kernels on a CPU: twice as fast.

It computes with NumPy, and most of its time goes into Python around that. `install` has it do some of this once:

- It makes `triton.language` its own at each launch, and again at each call of one jitted function by another, though
  the launch has done so. Here a launch does it once.
- Each tensor has a type of its own, with its shape in two forms and its name. Here equal types share these.
- Whether integers overflow is found out by seven more operations of Triton's. Here it takes two of NumPy's.

What kernels compute is the same, and so is what stops them.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """Stands for `interpreter._patch_lang`: what it changed stays as long as a launch runs, so it need not be again."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own
        self.done: set[ModuleType] = set()
        """Modules that are the interpreter's for the launch that runs; empty: none runs."""
        self.languages = functools.cache(_languages)

    def __call__(self, function: Any) -> Any:
        languages = self.languages(function)
        if self.done and languages <= self.done:
            return None  # a call within a launch, which asks for nothing back
        is_launch = not self.done
        scope = self.own(function)
        self.done |= languages
        return _Launch(scope, self.done) if is_launch else scope


class _Launch:
    """What a launch gives back at its end."""

    def __init__(self, scope: Any, done: set[ModuleType]) -> None:
        self.scope, self.done = scope, done

    def restore(self) -> None:
        """See `interpreter._LangPatchScope`."""
        self.done.clear()
        self.scope.restore()


def _languages(function: Any) -> frozenset[ModuleType]:
    """Those of `triton.language`'s modules that a function has a name for."""
    modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(module for module in modules if module in (tl, tl.core))


class _Dtypes:
    """Stands for `interpreter._get_np_dtype`, with a table that is made once."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own
        self.known: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.name not in self.known:
            self.known[element.name] = self.own(element)
        return self.known[element.name]


def _init_block_type(own: Callable[..., None]) -> Callable[..., None]:
    """Stands for `tl.block_type.__init__`."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            own(self, element_ty, shape)
            known[key] = {**vars(self), "_of_tensors": []}
        vars(self).update(known[key])

    return init


def _init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - the name of the argument that it stands for
    """Stands for `tl.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    found = vars(type).get("_of_tensors", [])
    if not found:
        shape = type.shape if type.is_block() else ()
        found += (tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape)))
    self.shape, self.numel = found


def _check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    """Stands for `TritonSemantic.binary_op_sanitize_overflow_impl`."""
    dtype = lhs.type.scalar
    if dtype.int_bitwidth >= 64:
        return
    assert dtype == rhs.type.scalar
    assert dtype.is_int()
    compute = getattr(operator, binary_op.__name__)
    found = compute(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    fits = dtype.get_int_min_value() <= found.min() and found.max() <= dtype.get_int_max_value()
    assert fits, f"int{dtype.int_bitwidth} overflow detected for operation {binary_op.__name__}"


def install() -> None:
    """Have the interpreter of this process so."""
    if isinstance(interpreter._patch_lang, _Patches):
        return
    interpreter._patch_lang = _Patches(interpreter._patch_lang)
    interpreter._get_np_dtype = _Dtypes(interpreter._get_np_dtype)
    tl.block_type.__init__ = _init_block_type(tl.block_type.__init__)
    tl.tensor.__init__ = _init_tensor
    type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = _check_overflow
