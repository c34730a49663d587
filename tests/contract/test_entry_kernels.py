"""Entry kernels launch what Triton would launch, without Triton from a variant's second launch on. No GPU takes part.

In the place of what Triton compiles stands an object that remembers how Triton tells the variant apart: by its own
binder, with the back end of NVIDIA or of AMD.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import random
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import atom_core.kernels
from atom_core.kernels.gated_activation import triton_kernel as gated_activation
from atom_core.kernels.gated_sum import triton_kernel as gated_sum
from atom_core.kernels.launch import EntryKernel, entry_kernel

HOPPER, MI300 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
LISTS = 60
"""Lists of arguments for each kernel."""

assert not knobs.runtime.interpret, "with TRITON_INTERPRET set nothing is compiled: run this apart from tests/unit"


def modules() -> Iterator[ModuleType]:
    """Those of our kernels that import Triton's."""
    for found in pkgutil.walk_packages(atom_core.kernels.__path__, "atom_core.kernels."):
        module = importlib.import_module(found.name)
        if any(isinstance(it, (JITFunction, EntryKernel)) for it in vars(module).values()):
            yield module


MODULES = tuple(modules())
ENTRY_KERNELS = tuple(
    {id(it): it for module in MODULES for it in vars(module).values() if isinstance(it, EntryKernel)}.values()
)


def name_of(kernel: EntryKernel) -> str:
    """As a test is called."""
    return f"{kernel.fn.__module__.removeprefix('atom_core.kernels.')}.{kernel.fn.__name__}"


class Compiled(CompiledKernel):
    """In the place of what Triton compiles; its ``run`` takes what a driver's launcher takes."""

    def __init__(self, variant: Any, gpu: Gpu) -> None:
        self.variant, self.gpu = variant, gpu
        self.metadata, self.packed_metadata, self.function = SimpleNamespace(target=gpu.target), (4, 1, 0), 5
        self.module, self.src, self.name = None, None, "kernel"

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, launch: Any, *given: Any) -> None:
        """A launch."""
        enter, leave, *args = given
        assert (function, metadata) == (5, (4, 1, 0))
        for hook in (enter, leave):
            if hook is not None:
                hook(launch)
        self.gpu.launched.append(((x, y, z), stream, tuple(args), self.variant))


class Gpu:
    """A driver, and Triton's launch, which binds arguments and compiles nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self.target, self.device, self.stream = target, 0, 7
        self.launched: list[tuple[Any, ...]] = []
        self.by_triton = 0
        self.binders: dict[JITFunction, Any] = {}

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def variant(self, kernel: JITFunction, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """As Triton tells variants of a kernel apart, which it loads on each device."""
        if id(kernel) not in self.binders:
            self.binders[id(kernel)] = kernel.create_binder()[-1]
        _, specialization, options = self.binders[id(kernel)](*args, **given)
        return self.device, tuple(specialization), str(options)

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> Compiled:
        """In the place of ``JITFunction.run``."""
        self.by_triton += 1
        compiled = Compiled(self.variant(kernel, args, given), self)
        bound = dict(zip(kernel.arg_names, args, strict=False)) | given
        values = [bound[name] for name in kernel.arg_names]
        x, y, z = (*grid, 1, 1)[:3]
        compiled.run(x, y, z, self.stream, 5, (4, 1, 0), None, None, None, *values)
        return compiled


@pytest.fixture(params=[HOPPER, MI300], ids=lambda it: it.backend)
def gpu(request, monkeypatch) -> Iterator[Gpu]:
    found = Gpu(request.param)
    monkeypatch.setattr(driver, "_active", found)

    def run(self: JITFunction, *args: Any, **given: Any) -> Any:
        return found.run(self, *args, **given)

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def fresh(kernel: EntryKernel) -> EntryKernel:
    """The same kernel, never launched."""
    return entry_kernel(kernel.jit_function)


def test_kernels_that_the_host_launches_are_entry_kernels():
    """Found by their launches in the source; others are called by kernels."""
    launched: set[str] = set()
    called: set[str] = set()
    for module in MODULES:
        tree = ast.parse(inspect.getsource(module))
        known = dict(vars(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                "atom_core.kernels."
            ):  # within functions
                imported = vars(importlib.import_module(str(node.module)))
                known |= {it.name: imported[it.name] for it in node.names if it.name in imported}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched |= {
                    name_of(it)
                    for it in _launched(node.func.value, known, f"{module.__name__}: {ast.unparse(node)[:80]}")
                }
            if isinstance(node, ast.FunctionDef) and "jit" in "".join(map(ast.unparse, node.decorator_list)):
                called |= {it.id for it in ast.walk(node) if isinstance(it, ast.Name)}
                called |= {it.attr for it in ast.walk(node) if isinstance(it, ast.Attribute)}
    assert launched == {name_of(it) for it in ENTRY_KERNELS}
    # What neither is launched as above nor called must be launched in another way.
    bare = {it.fn.__name__ for module in MODULES for it in vars(module).values() if isinstance(it, JITFunction)}
    assert bare - called == set()


def _launched(node: ast.expr, known: dict[str, Any], source: str) -> list[EntryKernel]:
    """The kernels that an expression in front of a grid stands for."""
    if isinstance(node, ast.Subscript):
        table = known.get(ast.unparse(node.value))
        found = list(table.values()) if isinstance(table, dict) else []
    else:
        found = [known.get(ast.unparse(node))]
    kernels = [it for it in found if isinstance(it, (EntryKernel, JITFunction))]
    for it in kernels:
        assert isinstance(it, EntryKernel), f"{source}: {it.fn.__name__} has no @entry_kernel"
    return kernels


def alternatives() -> list[tuple[Any, ...]]:
    """What a launch may be given: groups, within which one may take another's place."""
    numbers = torch.zeros(256, dtype=torch.bfloat16)
    tiles, plain, swizzled = numbers.view(16, 16), *(gl.NVMMASharedLayout(swizzle, 16, 2) for swizzle in (0, 32))
    of_tiles = [(tiles, [16, 8]), (tiles, [16, 16]), (tiles.float().bfloat16(), [16, 16]), (tiles.half(), [16, 16])]
    large = tuple(torch.empty(size, dtype=torch.uint8, device="meta") for size in (2**31 - 1, 2**31))
    return [
        (numbers, numbers[1:], numbers[8:], torch.nn.Parameter(numbers), None),
        (numbers.float(), numbers.int(), numbers.view(torch.uint8), numbers.to(torch.float8_e4m3fn)),
        large,
        tuple(TensorDescriptor.from_tensor(*it) for it in of_tiles),
        tuple(HopperDescriptor.from_tensor(*it, plain) for it in of_tiles),
        tuple(HopperDescriptor.from_tensor(tiles, [8, 16], layout) for layout in (plain, swizzled)),
        (0, 1, 2, 15, 16, 17, -1, -16),
        (1, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16),
        (2**40, 2**63, 2**64 - 1, 2**63 - 1),
        (None, 0.0, 1.0, 0.5, True, False, 1, numbers),
        (None, True, 1, 17, *large),
    ]


CONSTANTS = (None, 16, 64, 4096, "silu", 0.5, "")


@pytest.mark.parametrize("kernel", ENTRY_KERNELS, ids=name_of)
def test_what_is_launched_is_what_triton_would_launch(kernel, gpu):
    kernel, jit_function, chance = fresh(kernel), kernel.jit_function, random.Random(kernel.fn.__name__)
    groups = alternatives()
    kinds = [CONSTANTS if it.is_constexpr else chance.choice(groups) for it in jit_function.params]

    def arguments(near: dict[str, Any]) -> dict[str, Any]:
        """New ones, or all but one of those before."""
        changed = chance.choice(jit_function.arg_names)
        return {
            it.name: near[it.name] if near and it.name != changed else chance.choice(kinds[it.num])
            for it in jit_function.params
        }

    given: dict[str, Any] = {}
    for _ in range(LISTS):
        given = arguments(given if chance.random() < 0.8 else {})
        options = {"num_warps": chance.choice((4, 8))} | chance.choice(({}, {"launch_pdl": True}))
        for by_position in (True, False):
            names = [it.name for it in jit_function.params]
            split = next(it.num for it in jit_function.params if it.is_constexpr) if by_position else 0
            args, rest = tuple(given[it] for it in names[:split]), {it: given[it] for it in names[split:]} | options
            for _ in range(2):
                kernel[3, 2](*args, **rest)
                grid, stream, values, variant = gpu.launched[-1]
                assert (grid, stream) == ((3, 2, 1), gpu.stream)
                assert all(one is other for one, other in zip(values, given.values(), strict=True))
                assert variant == gpu.variant(jit_function, args, rest)
    assert gpu.by_triton <= len(gpu.launched) // 2 == 2 * LISTS


def sum_of(kernel: EntryKernel, *, at: int = 0, size: int = 64, **options: Any) -> None:
    """Launch a kernel of sums, whose tensors are ``at`` elements from an alignment."""
    x = torch.zeros(4, 4 * size, dtype=torch.bfloat16)[:, at : at + size]
    kernel[4, 1](x, x, x, x, 4 * size, 4 * size, 4 * size, size, BLOCK=64, OVERLAP=False, **options)


def test_triton_is_asked_once_for_a_variant(gpu):
    kernel = fresh(gated_sum._gated_sum)
    for given in ({}, {"at": 1}, {"size": 63}, {"size": 1}, {"num_warps": 8}):
        before = gpu.by_triton
        for _ in range(3):
            sum_of(kernel, **given)
        assert gpu.by_triton == before + 1
    assert len(gpu.launched) == 15
    # Another number or another address are nothing new.
    sum_of(kernel, size=80)
    sum_of(kernel, at=8)
    assert gpu.by_triton == 5


def test_each_device_has_its_own_and_each_launch_the_stream_of_its_time(gpu):
    kernel = fresh(gated_sum._gated_sum)
    for gpu.device, gpu.stream in ((0, 1), (0, 2), (1, 3), (1, 4), (0, 5)):
        sum_of(kernel)
    assert [(stream, variant[0]) for _, stream, _, variant in gpu.launched] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 0)]
    assert gpu.by_triton == 2


def test_hooks_at_a_launch_are_called(gpu):
    kernel, seen = fresh(gated_sum._gated_sum), []
    sum_of(kernel)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(note := lambda metadata: seen.append(metadata.get()["name"]))
        try:
            sum_of(kernel)
        finally:
            hook.remove(note)
    sum_of(kernel)
    assert seen == ["kernel", "kernel"]
    assert (gpu.by_triton, len(gpu.launched)) == (1, 4)


def test_where_nothing_is_compiled_nothing_is_remembered(gpu):
    kernel, calls = fresh(gated_sum._gated_sum), []
    with mock.patch.object(JITFunction, "run", lambda self, *args, **given: calls.append(args)):
        sum_of(kernel)
        sum_of(kernel)
    assert len(calls) == 2
    sum_of(kernel)
    assert gpu.by_triton == 1


def test_what_an_entry_kernel_does_not_take_is_said(gpu):
    kernel, x = fresh(gated_activation._gated_activation), torch.zeros(4, 128)
    given = {"KIND": 0, "OVERLAP": False}
    with pytest.raises(AssertionError, match=r"constants of _gated_activation are given by name"):
        kernel[4, 1](x, x, 128, 64, 64, **given)
    with pytest.raises(AssertionError, match=r"the grid of _gated_activation is .*, no tuple"):
        kernel[lambda constants: (4, 1)](x, x, 128, 64, BLOCK=64, **given)
    with pytest.raises(TypeError, match=r"takes tensors, tensor descriptors, numbers and None, not \(1, 2\)"):
        kernel[4, 1](x, x, 128, (1, 2), BLOCK=64, **given)


def test_what_triton_knows_of_a_kernel_is_found():
    kernel = gated_sum._gated_sum
    assert kernel.fn.__name__ == kernel.__name__ == "_gated_sum"
    assert kernel.arg_names[:3] == ["x", "y", "gate"]
    assert [it.name for it in kernel.params if it.is_constexpr] == ["BLOCK", "OVERLAP"]
    assert kernel.warmup.__self__ is kernel.jit_function
