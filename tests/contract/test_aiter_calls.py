"""Every call of aiter's that our code can make, held against the signatures that the real one has.

``tests/fakes/aiter_signatures.json`` is read from aiter's source by ``tools/aiter_signatures.py``. The fake binds each
call to it; here all call sites of ours are found in the source, and each must have been reached. What a call stands in
is an op of torch's, whose schema must say exactly what is written to.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import atom_core
from atom_core.kernels.aiter_library import CALLED
from atom_core.kernels.select import Target
from tests.aiter_cases import ONLY, cases_on
from tests.aiter_fake import ARCHITECTURES, calls, fake_aiter
from tests.integration.once import once

ROOT = Path(atom_core.__file__).parent
FILES = sorted(file for name in ("aiter_kernel.py", "aiter_persistent.py") for file in ROOT.rglob(name))
CPU = torch.device("cpu")


class Site(NamedTuple):
    """Where our code calls a function of aiter's."""

    path: str
    file: str
    line: int


def is_lookup(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "aiter_function"


def sites(file: Path) -> list[Site]:
    """All calls of the form ``aiter_function("aiter.name")(...)``."""
    return [
        Site(node.func.args[0].value, str(file), node.lineno)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and is_lookup(node.func)
    ]


def required(file: Path) -> set[str]:
    """The functions that a module asks for when its kernel is built, as constants anywhere in it."""
    tree = ast.parse(file.read_text())
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("aiter.")
    }


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


def test_only_kernels_of_aiters_reach_for_it_and_always_call_at_once():
    for file in sorted(ROOT.rglob("*.py")):
        lookups = [node for node in ast.walk(ast.parse(file.read_text())) if is_lookup(node)]
        if file.name == "aiter_library.py":
            continue
        assert not lookups or file in FILES, f"{file} looks up a function of aiter's"
        assert len(lookups) == len(sites(file)), f"{file} keeps a function of aiter's without calling it"


def files_on(arch: str) -> list[Path]:
    """Those of ops that aiter has kernels for there."""
    return [file for file in FILES if ONLY.get(file.parent.name, arch) == arch]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_call_site_is_reached_and_binds_to_the_real_signature(arch, ran):
    seen, _ = ran(arch)
    expected = {site for file in files_on(arch) for site in sites(file)}
    assert expected, "no call was found at all"
    missed = expected - seen
    assert not missed, f"{len(expected) - len(missed)} of {len(expected)} call sites reached on {arch}"


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_what_is_called_was_asked_for_when_the_kernel_was_built(file):
    text = file.read_text()
    assert "require(" in text
    # Every name stands at its call and once more where it is required.
    for site in sites(file):
        assert text.count(f'"{site.path}"') > sum(other.path == site.path for other in sites(file)), site


def test_the_fake_has_what_is_recorded_and_its_signatures_are_the_real_ones():
    with fake_aiter("gfx942"):
        recorded = importlib.import_module("aiter._recorded")
        for path in recorded.RECORD:
            module, _, name = path.rpartition(".")
            stand_in = inspect.signature(inspect.unwrap(getattr(importlib.import_module(module), name)))
            real = recorded.real_signature(path)
            assert [(it.name, it.kind, it.default) for it in stand_in.parameters.values()] == [
                (it.name, it.kind, it.default) for it in real.parameters.values()
            ], path
    called = {site.path for file in FILES for site in sites(file)}
    assert called == set(recorded.RECORD), "recorded and called differ"


def test_the_doctor_knows_every_function_that_is_called():
    called = {}
    for file in FILES:
        called.setdefault(file.parent.name, set()).update(site.path for site in sites(file))
    assert {op: set(paths) for op, paths in CALLED.items()} == called


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_no_function_is_named_that_is_not_recorded(file):
    with fake_aiter("gfx942"):
        assert required(file) <= set(sys.modules["aiter"]._recorded.RECORD)


def ops_of(file: Path) -> list[tuple[str, str]]:
    """(function, op) of every ``@custom_op("op", ...)``."""
    return [
        (node.name, decorator.args[0].value)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and decorator.func.id == "custom_op"
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_call_stands_in_an_op(file):
    inside = [
        (node.lineno, node.end_lineno)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    for site in sites(file):
        assert any(begin <= site.line <= end for begin, end in inside), site


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def run_checked(op, written: set[str], *args) -> object:
    """Run an op; what it wrote to joins ``written``, and must be what its schema says; its fake must foretell shapes.

    torch's own ``opcheck`` compares numbers, which a CPU does not for FP8.
    """
    schema = op.default._schema
    declared = {it.name for it in schema.arguments if it.alias_info is not None and it.alias_info.is_write}
    tensors = {it.name: arg for it, arg in zip(schema.arguments, args, strict=False) if isinstance(arg, torch.Tensor)}
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    with FakeTensorMode() as mode:
        foretold = op(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    results = op(*args)
    changed = {name for name, tensor in tensors.items() if not torch.equal(before[name], bits(tensor))}
    assert changed <= declared, f"{schema.name} writes to {changed}, and says {declared}"
    written |= changed
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
    for found, told in zip(flattened(results), flattened(foretold), strict=True):
        assert (found.shape, found.dtype, strides(found)) == (told.shape, told.dtype, strides(told)), schema.name
        assert not found.numel() or found.untyped_storage().data_ptr() not in inputs, f"{schema.name} returns an input"
    return results


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that are ever stepped by."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def flattened(results) -> list[torch.Tensor]:
    return [] if results is None else [results] if isinstance(results, torch.Tensor) else list(results)


@pytest.fixture(scope="module")
def ran() -> Callable[[str], tuple[set[Site], dict[str, set[str]]]]:
    """All cases of an architecture, each op of theirs checked: which calls they made, and what each op wrote to."""

    @once
    def ran(arch: str) -> tuple[set[Site], dict[str, set[str]]]:
        written: dict[str, set[str]] = {}
        with pytest.MonkeyPatch.context() as patch:
            for file in files_on(arch):
                module = importlib.import_module(module_of(file))
                for function, name in ops_of(file):
                    written[name] = set()
                    checked = partial(run_checked, getattr(torch.ops.atom, name), written[name])
                    patch.setattr(module, function, checked)
            with fake_aiter(arch):
                for case in cases_on(arch).values():
                    case(Target("rocm", arch), CPU)
                return {Site(call.path, call.file, call.line) for call in calls()}, written

    return ran


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ops_write_to_exactly_what_they_say_and_their_fakes_have_the_results_shapes(arch, ran):
    _, written = ran(arch)
    for name, found in written.items():
        arguments = getattr(torch.ops.atom, name).default._schema.arguments
        declared = {it.name for it in arguments if it.alias_info is not None and it.alias_info.is_write}
        assert found == declared, f"atom::{name} says that it writes to {declared}"


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("aiter.rms_norm", (torch.ones(1, 8),), "missing a required argument"),
        ("aiter.rms_norm", (torch.ones(1, 8), torch.ones(8), "1e-5"), "takes float for epsilon"),
        ("aiter.rms_norm", (torch.ones(1, 8), None, 1e-5), "takes no None for weight"),
        ("aiter.silu_and_mul", (torch.ones(1), torch.ones(2), 0.0, 1), "too many positional arguments"),
    ],
)
def test_a_call_that_does_not_bind_fails(path, args, message):
    module, _, name = path.rpartition(".")
    with fake_aiter("gfx942"):
        function = getattr(importlib.import_module(module), name)
        with pytest.raises(TypeError, match=message):
            function(*args)
