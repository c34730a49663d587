"""Gluon kernels on a CPU: enough of the language, in torch, for attention, linear layers, Gated DeltaNet and experts.

Triton's interpreter runs no Gluon. What is here knows no layouts, warps or waits: it tells whether the arithmetic and
the addresses of a kernel are right, not whether it waits for what it reads. Programs run one after the other.
Specialised warps of one run side by side, and wait at its barriers.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.kernels.gated_delta_net.triton_parts import silu
from tests.ptx_on_cpu import run_pairs

_LANGUAGE = "triton.experimental.gluon"
_LAYOUTS = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout")
#: Modules that are run so: each is imported anew, with the language below in Gluon's place.
_MODULES = (
    "atom_core.kernels.linear.few_rows_hopper",
    "atom_core.kernels.fp8_block_linear.few_rows_hopper",
    "atom_core.kernels.fp8_block_linear.specialized_hopper",
    "atom_core.kernels.experts.hopper",
    "atom_core.kernels.experts.few_routed_tokens_hopper",
    "atom_core.kernels.fp8_experts.hopper",
    "atom_core.kernels.attention.hopper_parts",
    "atom_core.kernels.attention.hopper_bytes",
    "atom_core.kernels.attention.hopper",
    "atom_core.kernels.mla_attention.hopper",
    "atom_core.kernels.mla_fused_decode.hopper",
    "atom_core.kernels.decode_attention.hopper",
    "atom_core.kernels.gated_delta_net.hopper",
)


def _plain(value: Any) -> Any:
    """A number or torch tensor."""
    if isinstance(value, Tensor):
        return value.data
    return getattr(value, "value", value)  # of Triton's constants


class DType:
    """A type of numbers."""

    def __init__(self, torch_dtype: torch.dtype) -> None:
        self.torch = torch_dtype
        self.primitive_bitwidth = torch_dtype.itemsize * 8

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and other.torch == self.torch

    def __hash__(self) -> int:
        return hash(self.torch)

    def __str__(self) -> str:
        """As Triton calls it."""
        named = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
        return named.get(self.torch, str(self.torch))

    @property
    def element_ty(self) -> DType:
        """What a pointer points at."""
        return self


class Tensor:
    """Numbers of a program; of no dimensions, a scalar."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __getitem__(self, index: Any) -> Any:
        return self._of(self.data[index])

    def _of(self, data: torch.Tensor) -> Tensor:
        return Tensor(data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    @property
    def shape(self) -> torch.Size:
        """As torch's."""
        return self.data.shape

    @property
    def dtype(self) -> DType:
        """The numbers'."""
        return DType(self.data.dtype)

    @property
    def type(self) -> Any:
        """Something whose layout has a parent."""
        return SimpleNamespace(layout=SimpleNamespace(parent=None))

    def to(self, dtype: DType) -> Tensor:
        """The numbers in another type."""
        return Tensor(self.data.to(dtype.torch))

    def permute(self, order: Any) -> Tensor:
        """As torch's."""
        return Tensor(self.data.permute(*order))

    def reshape(self, shape: Any) -> Tensor:
        """As torch's."""
        return Tensor(self.data.reshape(shape))


def _operation(name: str, reflected: bool) -> Callable[[Tensor, Any], Tensor]:
    function = getattr(operator, name)

    def apply(self: Tensor, other: Any) -> Tensor:
        if isinstance(other, Pointer):
            return NotImplemented
        one, two = self.data, _plain(other)
        return Tensor(torch.as_tensor(function(two, one) if reflected else function(one, two)))

    return apply


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and_",
    "or_",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
):
    setattr(Tensor, f"__{_name.strip('_')}__", _operation(_name, reflected=False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tensor, f"__r{_name.strip('_')}__", _operation(_name, reflected=True))
Tensor.__neg__ = lambda self: Tensor(-self.data)  # type: ignore[attr-defined]
Tensor.__invert__ = lambda self: Tensor(~self.data)  # type: ignore[attr-defined]


class Pointer(Tensor):
    """Places in a tensor's memory, as the number of elements behind its first."""

    def __init__(self, memory: torch.Tensor, data: torch.Tensor) -> None:
        super().__init__(data)
        self.memory = memory

    @classmethod
    def into(cls, tensor: torch.Tensor) -> Pointer:
        """Its first element."""
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.itemsize,))
        return cls(whole, torch.tensor(tensor.storage_offset()))

    def _of(self, data: torch.Tensor) -> Pointer:
        return Pointer(self.memory, data)

    @property
    def dtype(self) -> DType:
        """What is there."""
        return DType(self.memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.data + _plain(other))

    __radd__ = __iadd__ = __add__


class Shared:
    """Shared memory: as numbers of a product it is what was stored last."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, place: Any) -> Shared:
        """One of several tiles."""
        return Shared(self.data[int(place)])

    def slice(self, start: int, length: int) -> Shared:
        """Some of its first dimension."""
        return Shared(self.data[start : start + length])

    @property
    def shape(self) -> torch.Size:
        """As torch's."""
        return self.data.shape

    @property
    def dtype(self) -> DType:
        """The numbers'."""
        return DType(self.data.dtype)

    def load(self, layout: Any) -> Tensor:
        """All of it."""
        return Tensor(self.data.clone())

    def store(self, value: Tensor) -> None:
        """Write all of it."""
        assert value.dtype.torch == self.data.dtype
        self.data.copy_(value.data)

    def permute(self, order: Any) -> Shared:
        """As torch's."""
        return Shared(self.data.permute(*order))


@dataclass
class TensorDescriptor:
    """A tensor's rows, which are copied in blocks."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> DType:
        """The numbers'."""
        return DType(self.base.dtype)

    @property
    def block_type(self) -> Any:
        """Something of a block's shape."""
        return SimpleNamespace(shape=self.block_shape)

    def block(self, at: list[Any], whole: bool = True) -> torch.Tensor:
        """The numbers of a block in memory; ``whole``: all of it is to be there."""
        rows = self.base.as_strided(self.shape, self.strides, self.base.storage_offset())
        found = rows[
            tuple(slice(int(begin), int(begin) + size) for begin, size in zip(at, self.block_shape, strict=True))
        ]
        assert list(found.shape) == self.block_shape or not whole
        return found


_program: list[int] = [0, 0, 0]
_grid: list[int] = [1, 1, 1]


class Kernel:
    """What is decorated: a function, or with a grid a launch."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        # A function of Triton's language finds the words of Gluon's, which has all of its own.
        words = None
        if "tl" in fn.__globals__:
            used = {name: fn.__globals__.get(name) for name in fn.__code__.co_names}
            jitted = {name: Kernel(it.fn) for name, it in used.items() if type(it) is type(silu)}
            words = {**fn.__globals__, **jitted, "tl": sys.modules[f"{_LANGUAGE}.language"]}
        self.fn = fn if words is None else FunctionType(fn.__code__, words, fn.__name__, fn.__defaults__)

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return self.fn(*arguments, **constants)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        grid = [*grid, 1, 1][:3] if isinstance(grid, tuple) else [grid, 1, 1]

        def launch(*arguments: Any, num_warps: int = 4, launch_pdl: bool = False, **constants: Any) -> None:
            given = [_argument(it) for it in arguments]
            _grid[:] = grid
            for at in range(math.prod(grid)):
                _program[:] = [at % grid[0], at // grid[0] % grid[1], at // (grid[0] * grid[1])]
                self.fn(*given, **constants)

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer.into(value)
    return Tensor(torch.tensor(value)) if isinstance(value, int) else value


def _jit(function: Any = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _masked(pointer: Pointer, mask: Any, like: torch.Size | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = torch.broadcast_shapes(pointer.shape, like or (), _plain(mask).shape if mask is not None else ())
    allowed = torch.ones(shape, dtype=torch.bool) if mask is None else _plain(mask).expand(shape)
    return torch.where(allowed, pointer.data.expand(shape), 0), allowed


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **options: Any) -> Tensor:
    at, allowed = _masked(pointer, mask)
    found = pointer.memory[at]
    return Tensor(torch.where(allowed, found, torch.as_tensor(_plain(other), dtype=found.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None, **options: Any) -> None:
    value = torch.as_tensor(_plain(value), dtype=pointer.memory.dtype)
    at, allowed = _masked(pointer, mask, value.shape)
    as_bytes(pointer.memory)[at[allowed]] = as_bytes(value).expand(at.shape)[allowed]


def _async_load(to: Shared, pointer: Pointer, mask: Any = None, **options: Any) -> None:
    to.data.copy_(_load(pointer, mask).data.expand(to.data.shape))


def _copy_in(source: TensorDescriptor, at: list[Any], bar: Shared, to: Shared, pred: Any = True) -> None:
    """Rows and columns that the tensor does not have are zeros."""
    if pred:
        with _BARRIERS:
            found = source.block(at, whole=False)
            to.data.zero_()
            to.data[tuple(slice(0, size) for size in found.shape)] = found
            _barrier(bar).bytes -= to.data.nbytes
            _barrier(bar).complete()


def _copy_out(target: TensorDescriptor, at: list[Any], source: Shared) -> None:
    target.block(at).copy_(source.data)


@dataclass
class _Barrier:
    """An mbarrier: a phase is complete once so many have arrived, and all bytes that were expected."""

    count: int
    arrived: int = 0
    bytes: int = 0
    phases: int = 0

    def complete(self) -> None:
        """Go on to the next phase if this one is complete."""
        assert self.arrived <= self.count, "more arrive than are waited for"
        if self.arrived == self.count and not self.bytes:
            self.arrived, self.phases = 0, self.phases + 1
            _BARRIERS.notify_all()


#: Guards the barriers of the running program, by their place in shared memory.
_BARRIERS = threading.Condition()
_barriers: dict[int, _Barrier] = {}


def _barrier(bar: Shared) -> _Barrier:
    return _barriers[bar.data.data_ptr()]


def _init(bar: Shared, count: int) -> None:
    _barriers[bar.data.data_ptr()] = _Barrier(count)


def _expect(bar: Shared, size: int, pred: Any = True) -> None:
    if pred:
        with _BARRIERS:
            _barrier(bar).bytes += size
            _arrive(bar)


def _arrive(bar: Shared, count: int = 1, pred: Any = True) -> None:
    if pred:
        with _BARRIERS:
            _barrier(bar).arrived += count
            _barrier(bar).complete()


def _wait(bar: Shared, phase: Any) -> None:
    """Until the phase of this parity is complete; a barrier tells no more of a phase."""
    with _BARRIERS:
        _BARRIERS.wait_for(lambda: _failed.is_set() or _barrier(bar).phases % 2 != int(phase), _seconds())
        assert _barrier(bar).phases % 2 != int(phase), "nothing arrives before this wait"


def _seconds() -> float:
    """How long other warps of the program may take to arrive."""
    return 30.0 if _specialized.is_set() else 0.0


#: Whether the program's warps run different functions at the moment, and whether some have failed.
_specialized, _failed = threading.Event(), threading.Event()


def _warp_specialize(partitions: list[tuple[Kernel, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """Run functions side by side, each in a thread."""
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    failures: list[BaseException] = []

    def run(function: Kernel, given: tuple[Any, ...]) -> None:
        try:
            function(*given)
        except BaseException as error:  # noqa: BLE001 - raised below, once the others have ended
            failures.append(error)
            with _BARRIERS:
                _failed.set()
                _BARRIERS.notify_all()

    _specialized.set()
    try:
        with ThreadPoolExecutor(len(partitions)) as pool:
            for function, given in partitions:
                pool.submit(run, function, given)
        if failures:
            raise failures[0]
    finally:
        _specialized.clear()
        _failed.clear()


def _multiply(a: Shared, b: Shared, sums: Tensor, use_acc: bool = True, **options: Any) -> Tensor:
    product = a.data.float() @ b.data.float()
    return Tensor(sums.data + product if use_acc else product)


def _atomic_add(pointer: Pointer, value: int, **options: Any) -> Tensor:
    before = pointer.memory[pointer.data].clone()
    pointer.memory[pointer.data] += value
    return Tensor(before)


def _reduced(function: Callable[..., torch.Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, axis: Tensor(function(x.data, axis))


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    return lambda *given: Tensor(function(*(torch.as_tensor(_plain(it)) for it in given)))


def _unwritten(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)


def _where(condition: Tensor, one: Any, other: Any) -> Tensor:
    return Tensor(torch.where(*(torch.as_tensor(_plain(it)) for it in (condition, one, other))))


def _assembly(code: str, constraints: str, given: list[Tensor], dtype: DType, is_pure: bool, pack: int) -> Tensor:
    """Instructions on words of 16 bits; of those without inputs, 0."""
    return Tensor(run_pairs(code, given[0].data, dtype.torch) if given else torch.tensor(0))


def _nothing(*arguments: Any, **options: Any) -> None:
    """Of waits, fences and instructions."""


def _layout(*arguments: Any) -> None:
    """Of layouts."""


def _language() -> dict[str, ModuleType]:
    """Gluon's modules, by name."""
    shared = SimpleNamespace(get_default_for=_layout)
    language = {
        "constexpr": lambda value: value,
        **{name: DType(getattr(torch, name)) for name in ("int32", "int64", "float32", "bfloat16", "float16")},
        "float8e4nv": DType(torch.float8_e4m3fn),
        **dict.fromkeys(_LAYOUTS, _layout),
        "NVMMASharedLayout": shared,
        "program_id": lambda axis: Tensor(torch.tensor(_program[axis])),
        "num_programs": lambda axis: _grid[axis],
        "num_warps": lambda: 4,
        "static_range": range,
        "static_assert": _nothing,
        "inline_asm_elementwise": _assembly,
        "join": lambda one, other: Tensor(torch.stack([one.data, other.data], -1)),
        "split": lambda both: tuple(map(Tensor, both.data.unbind(-1))),
        "thread_barrier": _nothing,
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(_unwritten(shape, dtype.torch)),
        "arange": lambda begin, end, layout: Tensor(torch.arange(begin, int(_plain(end)))),
        "zeros": lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=dtype.torch)),
        "full": lambda shape, value, dtype, layout: Tensor(torch.full(shape, value, dtype=dtype.torch)),
        "convert_layout": lambda x, layout: x,
        "multiple_of": lambda x, number: x,
        "max_contiguous": lambda x, number: x,
        "load": _load,
        "store": _store,
        "atomic_add": _atomic_add,
        "warp_specialize": _warp_specialize,
        "where": _where,
        "sum": _reduced(torch.sum),
        "max": _reduced(torch.amax),
        "min": _reduced(torch.amin),
        "abs": _elementwise(torch.abs),
        "maximum": _elementwise(torch.maximum),
        "minimum": _elementwise(torch.minimum),
        "exp": _elementwise(torch.exp),
        "exp2": _elementwise(torch.exp2),
        "log": _elementwise(torch.log),
        "rsqrt": _elementwise(torch.rsqrt),
        "sqrt": _elementwise(torch.sqrt),
        "ceil": _elementwise(torch.ceil),
        "cdiv": lambda x, y: (x + (y - 1)) // y,
    }
    copies = {"async_load": _async_load, "commit_group": _nothing, "wait_group": _nothing}
    barriers = {
        "MBarrierLayout": _layout,
        "init": _init,
        "expect": _expect,
        "arrive": _arrive,
        "wait": _wait,
    }
    tiles = {"async_load": _copy_in, "async_store": _copy_out, "store_wait": _nothing}
    products = {
        "mbarrier": SimpleNamespace(**barriers),
        "tma": SimpleNamespace(**tiles),
        "fence_async_shared": _nothing,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": lambda count, waited: waited[0] if len(waited) == 1 else waited,
    }
    found: dict[str, ModuleType] = {}
    for name, contents in (
        ("", {"jit": _jit, "constexpr_function": lambda function: function}),
        (".language", language),
        (".language.nvidia", {}),
        (".language.nvidia.ampere", {"async_copy": SimpleNamespace(**copies)}),
        (".language.nvidia.hopper", products),
    ):
        module = ModuleType(_LANGUAGE + name)
        vars(module).update(contents)
        found[module.__name__] = module
    found[_LANGUAGE].language = found[f"{_LANGUAGE}.language"]  # type: ignore[attr-defined]
    return found


@contextmanager
def on_cpu() -> Iterator[dict[str, ModuleType]]:
    """The modules above, run by this language, by name; others that were imported before go on with their own."""
    # Triton asks for more of it later, which is then not looked for in what is put here.
    importlib.import_module(f"{_LANGUAGE}.nvidia.hopper")
    language = _language()
    replaced = {name: sys.modules.get(name) for name in (*language, *_MODULES)}
    try:
        for name, module in language.items():
            _put(name, module)
        for name in _MODULES:
            sys.modules.pop(name, None)
        modules = {name: importlib.import_module(name) for name in _MODULES}
        for module in modules.values():
            if hasattr(module, "TensorDescriptor"):
                module.TensorDescriptor = TensorDescriptor
        yield modules
    finally:
        for name, before in replaced.items():
            _put(name, before)


def _put(name: str, module: ModuleType | None) -> None:
    """Have a module found under a name, by both of the ways in which it is imported; None: by neither."""
    parent, _, own = name.rpartition(".")
    package = sys.modules.get(parent)
    if module is None:
        sys.modules.pop(name, None)
        if hasattr(package, own):
            delattr(package, own)
        return
    sys.modules[name] = module
    if package is not None:
        setattr(package, own, module)
