"""Triton's interpreter without what it does over and over, for tests that run kernels on a CPU: twice as fast.

It computes with NumPy, and most of its time goes into Python around that. `install` has it do some of this once:

- It makes `triton.language` its own at each launch, and again at each call of one jitted function by another, though
  the launch has done so. Here a launch does it once.
- Each tensor has a type of its own, with its shape in two forms and its name. Here equal types share these.
- Each sum and product of integers is computed again with 64 bits, for a check that Triton makes in debug mode alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """Stands for `interpreter._patch_lang`: what it changed stays as long as a launch runs, so it need not be again.

    Launches of several threads share it: only at the end of the last one the language is Triton's own again.
    """

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own
        self.done: set[ModuleType] = set()
        """Modules that are the interpreter's for the launches that run."""
        self.launches = 0
        """That run."""
        self.scopes: list[Any] = []
        """To be restored at their end."""
        self.languages = functools.cache(_languages)
        self._lock, self._mine = threading.RLock(), threading.local()

    def __call__(self, function: Any) -> Any:
        begins, self._mine.begins = getattr(self._mine, "begins", False), False
        if not self.launches:
            return self.own(function)  # a function that the host calls
        with self._lock:
            languages = self.languages(function)
            if not languages <= self.done:
                scope = self.own(function)
                if begins:  # what functions within it have changed, Triton leaves as well
                    self.scopes.append(scope)
                self.done |= languages
        return self

    def restore(self) -> None:
        """A launch asks for it before :meth:`launch` ends."""

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Within, one runs."""
        with self._lock:
            self.launches += 1
        self._mine.begins = True
        try:
            yield
        finally:
            with self._lock:
                self.launches -= 1
                if not self.launches:
                    while self.scopes:
                        self.scopes.pop().restore()
                    self.done.clear()


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


def install() -> None:
    """Have the interpreter of this process so."""
    if isinstance(interpreter._patch_lang, _Patches):
        return
    patches, run = _Patches(interpreter._patch_lang), interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **options: Any) -> Any:
        with patches.launch():
            return run(executor, *args, **options)

    interpreter._patch_lang = patches
    interpreter.GridExecutor.__call__ = launch
    interpreter._get_np_dtype = _Dtypes(interpreter._get_np_dtype)
    tl.block_type.__init__ = _init_block_type(tl.block_type.__init__)
    tl.tensor.__init__ = _init_tensor
    assert not interpreter.interpreter_builder.options.debug
    type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = lambda *operands: None
