"""Entry kernels: what the host launches of Triton, in a fraction of the host time of Triton's own launch.

Triton binds the arguments of each launch, asks what each specialises the kernel on, writes that down as the text of a
key, and compares the globals that the kernel uses with those that it was compiled with. In an eager step of small
kernels, such as a prompt of some hundred tokens, the GPU waits for it. An entry kernel goes through Triton once for
each variant. What Triton returns is remembered under a key of a few microseconds, and launched without it from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

K = TypeVar("K")

#: From here on, Triton's HIP backend addresses a storage by 64 bits.
_BUFFER_LIMIT = 2**31


class _Prepared(NamedTuple):
    """A variant of a kernel, loaded on a device."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    """What a launch takes behind the arguments by position."""
    compiled: CompiledKernel


class _CallSite:
    """A way to call a kernel: so many arguments by position, and those of certain names."""

    def __init__(self, kernel: JITFunction, args: tuple[Any, ...], given: Mapping[str, Any], backend: str) -> None:
        by_position, by_name = kernel.params[: len(args)], kernel.params[len(args) :]
        assert not any(it.is_constexpr for it in by_position), f"constants of {kernel.__name__} are given by name"
        named = [it for it in by_name if not it.is_constexpr]
        constants = [it.name for it in by_name if it.is_constexpr]
        options = [name for name in given if name not in kernel.arg_names]
        self.named = _getter(it.name for it in named) if named else None
        """Of what is given by name: the arguments that are no constants; None where there are none."""
        self.constants = _getter((*constants, *options))
        """Of what is given by name: all else."""
        self.rest = _getter(it.name for it in by_name)
        """Of what is given by name: what a launch takes, in the kernel's order."""
        # 0 for the type alone, 1 for the number 1 too, 2 for alignment too.
        specializes = [
            0 if it.do_not_specialize else 1 if it.do_not_specialize_on_alignment else 2
            for it in (*by_position, *named)
        ]
        self.told = _teller((*args, *(given[it.name] for it in named)), specializes, backend != "cuda")
        self.prepared: dict[tuple[Any, ...], _Prepared] = {}


class EntryKernel:
    """A Triton or Gluon kernel that the host launches by ``kernel[grid](*arguments, **constants)``, as Triton's own.

    The grid is a tuple of one to three numbers. Constants (``tl.constexpr``) and options are given by name. Triton's
    hooks at a launch are called; ``pre_run_hooks`` and Triton's check of globals see a variant's first launch alone.
    Everything else of Triton's object is found here, too.
    """

    def __init__(self, jit_function: JITFunction) -> None:
        self.jit_function = jit_function
        self._sites: dict[tuple[object, ...], _CallSite] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit_function, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **given: Any) -> None:
        site = self._sites.get((len(args), *given))
        if site is None:
            self._prepare(grid, args, given)
            return
        active = driver.active
        device = active.get_current_device()
        if site.named is None:
            key = (device, *given.values(), *site.told(*args))
        else:
            key = (device, *site.constants(given), *site.told(*args, *site.named(given)))
        found = site.prepared.get(key)
        if found is None:
            self._prepare(grid, args, given)
            return
        run, function, metadata, constants, compiled = found
        if site.named is not None:
            constants = site.rest(given)
        x, y, z = (*grid, 1, 1)[:3]
        runtime = knobs.runtime
        if _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook):
            compiled[x, y, z](*args, *constants)
        else:
            stream = active.get_current_stream(device)
            run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)

    def _prepare(self, grid: tuple[int, ...], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        """Launch by Triton, and remember what it has compiled."""
        assert isinstance(grid, tuple), f"the grid of {self.jit_function.__name__} is {grid!r}, no tuple"
        compiled = self.jit_function[grid](*args, **given)
        if not isinstance(compiled, CompiledKernel):  # one of Triton's hooks has kept it from compiling
            return
        place = (len(args), *given)
        site = self._sites.get(place)
        if site is None:
            backend = compiled.metadata.target.backend
            site = self._sites[place] = _CallSite(self.jit_function, args, given, backend)
        named = () if site.named is None else site.named(given)
        fixed = given.values() if site.named is None else site.constants(given)
        key = (driver.active.get_current_device(), *fixed, *site.told(*args, *named))
        metadata = compiled.packed_metadata
        site.prepared[key] = _Prepared(compiled.run, compiled.function, metadata, site.rest(given), compiled)


def entry_kernel(kernel: K) -> K:
    """Decorate a kernel that the host launches, above ``triton.jit`` or ``gluon.jit``; see :class:`EntryKernel`.

    What Triton's interpreter runs stays as it is.
    """
    return EntryKernel(kernel) if isinstance(kernel, JITFunction) else kernel  # type: ignore[return-value]


def _getter(names: Iterable[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What finds these in a mapping, in this order."""
    wanted = tuple(names)
    return itemgetter(*wanted) if len(wanted) > 1 else lambda given: tuple(given[name] for name in wanted)


def _calls(hook: Any) -> Any:
    """Whether a hook of Triton's calls anything; it is None, a function or a chain of them."""
    return getattr(hook, "calls", hook)


# What Triton tells variants of a kernel apart by, or finer: of a number its width, whether it is 1 and whether 16
# divides it; of a tensor its dtype and alignment, and on AMD whether its storage has less than 2 GiB.


def _told(arg: Any, special: int, amd: bool) -> Any:
    """Of one argument; ``special``: see :class:`_CallSite`."""
    if arg is None:
        return None
    if isinstance(arg, Tensor):
        aligned = special < 2 or arg.data_ptr() % 16 == 0
        pointer = arg.dtype if aligned else (arg.dtype, "unaligned")
        return (pointer, arg.untyped_storage().nbytes() < _BUFFER_LIMIT) if amd else pointer
    if type(arg) is bool or type(arg) is float:
        return type(arg)
    if isinstance(arg, int):
        number = 0 if special == 0 else 1 if arg == 1 else 0 if arg % 16 or special == 1 else 16
        narrow = -0x80000000 <= arg < 0x80000000
        return number if narrow else (number, "signed" if arg < 2**63 else "unsigned")
    if hasattr(arg, "block_shape"):  # a tensor descriptor
        return type(arg), arg.base.dtype, len(arg.shape), tuple(arg.block_shape), getattr(arg, "layout", None)
    raise TypeError(f"An entry kernel takes tensors, tensor descriptors, numbers and None, not {arg!r}.")


def _teller(args: Sequence[Any], specializes: Sequence[int], amd: bool) -> Callable[..., tuple[Any, ...]]:
    """A function of the arguments of a launch that tells :func:`_told` of each, soonest where they are as in ``args``.

    It runs at each launch. One expression without a loop takes half the time, so it is put together as Triton does for
    its own; what an argument's expression does not cover is asked of the function.
    """
    names = [f"arg{at}" for at in range(len(args))]
    known: dict[str, Any] = {"told": _told, "limit": _BUFFER_LIMIT}
    parts = []
    for name, arg, special in zip(names, args, specializes, strict=True):
        known[f"type_{name}"] = type(arg)
        quick, check = "", f"type({name}) is type_{name}"
        if isinstance(arg, Tensor):
            quick = f"({name}.dtype, {name}.untyped_storage().nbytes() < limit)" if amd else f"{name}.dtype"
            check += f" and not {name}.data_ptr() & 15" if special == 2 else ""
        elif type(arg) is int:
            quick = ("0", f"1 if {name} == 1 else 0", f"1 if {name} == 1 else 0 if {name} & 15 else 16")[special]
            check += f" and -0x80000000 <= {name} < 0x80000000"
        elif arg is None:
            quick, check = "None", f"{name} is None"
        general = f"told({name}, {special}, {amd})"
        parts.append(f"({quick}) if {check} else {general}" if quick else general)
    told = "".join(f"{it}, " for it in parts)
    return cast("Callable[..., tuple[Any, ...]]", eval(f"lambda {', '.join(names)}: ({told})", known))
