"""Compile ahead of time what a Triton kernel's launcher would launch on each GPU that we name; no GPU is needed.

What a block needs of shared memory must be there: more than the hardware has is an error at the first launch only. On
AMD no register may spill to memory, and matrices are multiplied by the matrix cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.experts import grouped as grouped_kernel
from atom_core.kernels.fp8_linear.quantize import Made
from atom_core.kernels.launch import EntryKernel
from atom_core.kernels.linear import triton_kernel as linear_kernel
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import why_no_triton_cache
from benchmarks._amd_resources import LDS, Resources
from tests.latent_cases import LatentCase

CPU = torch.device("cpu")
KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """An architecture and the shared memory that one block may have there."""

    target: GPUTarget
    shared_memory: int

    def __str__(self) -> str:
        return str(self.target.arch)

    @property
    def nvidia(self) -> bool:
        """Whether it is one of NVIDIA's."""
        return self.target.backend == "cuda"

    @property
    def device(self) -> Target:
        """As kernels are chosen for it."""
        return Target("cuda", f"sm{self.target.arch}") if self.nvidia else Target("rocm", str(self.target.arch))

    def has(self, cache_dtype: torch.dtype) -> bool:
        """Whether our kernels say that they take such a cache here."""
        return why_no_triton_cache(torch.bfloat16, cache_dtype, self.device) is None


# CUDA programming guide, technical specifications of compute capability 9.0; for AMD's see benchmarks/_amd_resources.
GPUS = (
    *(Gpu(GPUTarget("hip", arch, 64), size) for arch, (size, _) in LDS.items()),
    Gpu(GPUTarget("cuda", 90, 32), 227 * KIB),
)

FP8_CACHES = tuple((gpu, dtype) for gpu in GPUS for dtype in FP8_DTYPES if gpu.has(dtype))
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=str)

#: What the running test compiled for AMD's GPUs, by kernel.
COMPILED: list[tuple[str, Resources]] = []


class Launched(Exception):
    """Instead of a launch: its arguments."""

    def __init__(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.arguments, self.constants = arguments, constants


class Recorder:
    """Stands in for a kernel."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            raise Launched(arguments, constants)

        return launch


class Recorders(dict):
    """Stands in for the table of kernels; remembers which was asked for."""

    asked = ""

    def __getitem__(self, name: str) -> Any:
        self.asked = name
        return Recorder()


class Keeper:
    """Stands in for a kernel, and keeps its launches."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.launches.append(Launched(arguments, constants))


def keep(
    monkeypatch: pytest.MonkeyPatch, *kernels: tuple[Any, str]
) -> Callable[[], list[tuple[JITFunction, Launched]]]:
    """Have these kernels' launches kept: what is returned tells them, each with its kernel."""
    originals = [getattr(module, name) for module, name in kernels]
    keepers = [Keeper() for _ in kernels]
    for (module, name), keeper in zip(kernels, keepers, strict=True):
        monkeypatch.setattr(module, name, keeper)
    return lambda: [(it, launch) for it, kept in zip(originals, keepers, strict=True) for launch in kept.launches]


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}


def type_of(argument: Any) -> str:
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return POINTERS[argument.dtype]
    if isinstance(argument, TensorDescriptor):
        pointer = POINTERS[argument.base.dtype].removeprefix("*")
        return f"tensordesc<{pointer}{argument.block_shape},{argument.layout!r}>"
    return "fp32" if isinstance(argument, float) else "i32"


def specialized(kernel: JITFunction, positional: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    """What a launch tells the compiler of its arguments; without it loads are narrow and take no shared memory."""
    return {
        (at,): [["tt.divisibility", 16]]
        for at, parameter in enumerate(kernel.params)
        if not parameter.do_not_specialize
        and (
            isinstance(value := positional.get(parameter.name), torch.Tensor)
            or (isinstance(value, int) and value % 16 == 0)
        )
    }


def ones_of(kernel: JITFunction, positional: dict[str, Any]) -> list[str]:
    """Numbers that a launch makes constants, for strides of 1 are what lets loads be wide."""
    fixed = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return [name for name, value in positional.items() if type(value) is int and value == 1 and name not in fixed]


def compile_launch(kernel: Any, launched: Launched, gpu: Gpu) -> CompiledKernel:
    kernel = kernel.jit_function if isinstance(kernel, EntryKernel) else kernel
    assert isinstance(kernel, JITFunction), (
        "with TRITON_INTERPRET set nothing is compiled: run this apart from tests/unit"
    )
    given = {**dict(zip(kernel.arg_names, launched.arguments, strict=False)), **launched.constants}
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    positional = {name: value for name, value in given.items() if name in kernel.arg_names and name not in fixed}
    signature = {name: type_of(value) for name, value in positional.items()}
    constants = {name: value for name, value in launched.constants.items() if name in fixed}
    options = {name: value for name, value in launched.constants.items() if name not in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    constants |= {name: None for name, value in positional.items() if value is None}
    ones = ones_of(kernel, positional)
    signature |= dict.fromkeys(ones, "constexpr")
    constants |= dict.fromkeys(ones, 1)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    order = {name: signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        source(kernel, order, places, specialized(kernel, positional)), target=gpu.target, options=options
    )
    assert compiled.metadata.shared <= gpu.shared_memory
    if not gpu.nvidia:
        resources = Resources.of(str(gpu.target.arch), compiled.metadata, compiled.asm)
        COMPILED.append((f"{kernel.fn.__module__}.{kernel.__name__}".removeprefix("atom_core.kernels."), resources))
        assert not resources.faults()
        assert f"; Occupancy: {resources.waves_by_registers}\n" in compiled.asm["amdgcn"], "LLVM counts other waves"
    return compiled


@dataclass
class Found:
    """What :func:`compiles` compiled; set behind its body."""

    launched: Launched | None = None
    compiled: CompiledKernel | None = None


@contextmanager
def compiles(module: Any, name: str, gpu: Gpu) -> Iterator[Found]:
    """Compile what the body would launch of a module's kernel; the body ends there."""
    kernel, found = getattr(module, name), Found()
    with mock.patch.object(module, name, Recorder()), pytest.raises(Launched) as launched:
        yield found
    found.launched = launched.value
    found.compiled = compile_launch(kernel, launched.value, gpu)


def amd_instructions(compiled: CompiledKernel) -> str:
    """The instructions alone, a line each, without labels and comments."""
    lines = (line.partition(";")[0] for line in compiled.asm["amdgcn"].splitlines())
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith("."))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


#: Latents of DeepSeek V2 and V3.
DEEPSEEK: dict[str, Any] = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}

LATENTS = {
    "16 heads, bfloat16": (LatentCase("", (), heads=16, **DEEPSEEK), torch.bfloat16),
    "128 heads, bfloat16": (LatentCase("", (), heads=128, page_size=64, **DEEPSEEK), torch.bfloat16),
    "16 heads, float32": (LatentCase("", (), heads=16, **DEEPSEEK), torch.float32),
    "128 heads, float16, one token a page": (LatentCase("", (), heads=128, page_size=1, **DEEPSEEK), torch.float16),
}


#: Products whose kernels or tiles differ: by rows of x, by the weight's size; one that no tile divides.
PRODUCTS = [
    (1, 4096, 4096),
    (1, 1024, 3072),
    (1, 32768, 4096),
    (8, 6144, 4096),
    (8, 4096, 12288),
    (8, 4096, 1024),
    (3, 100, 1000),
    (1, 65536, 1024),
]


def in_front(way: str, size: int) -> Made:
    """What makes rows of so many numbers that are quantised."""
    norm = linear_kernel.Norm(zeros(size), 1e-6)
    return {
        "alone": Made(),
        "normed": Made(norm),
        "added and normed": Made(norm, zeros(2, size)),
        "activated": Made(activation="silu"),
    }[way]


#: What is normed is as long as a model is wide; the longest row of others is an MLP's.
FRONTS = ("alone", "normed", "added and normed", "activated")


#: What sorts tokens by their experts and adds up the answers.
SORTING = [(grouped_kernel, name) for name in ("_count", "_arrange", "_place", "_sort", "_combine")]

#: Of a layer of DeepSeek V3 with its shared expert among the routed ones.
WITH_SHARED = {"count": 257, "top_k": 9}
