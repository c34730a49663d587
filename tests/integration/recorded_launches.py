"""What Triton's kernels of Gated DeltaNet would be compiled for in an engine on a CPU, where torch runs in their place.

:func:`record` is called in the engine's process before a model is built. Each layer then has the kernel of a GPU beside
its own, whose launches are written to the file that the variable :data:`VARIABLE` names: what Triton tells compiled
variants apart by, and whether the engine was warming up.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "RECORDED_LAUNCHES"
#: By module, the kernels that it launches.
KERNELS = {
    "atom_core.kernels.gated_delta_net.triton_prefill": ("mix", "solve", "carry", "answer"),
    "atom_core.kernels.gated_delta_net.triton_decode": ("_gated_delta_decode",),
}


@dataclass(frozen=True)
class Recorded:
    """What an engine launched, each variant once."""

    warmed: frozenset[str]
    served: frozenset[str]

    def assert_warm(self) -> None:
        """What was served was warmed up, and nothing with other optional arguments was."""
        assert {it.partition(":")[0] for it in self.served} == {name for names in KERNELS.values() for name in names}
        assert self.served - self.warmed == frozenset()
        assert _optional(self.warmed) == _optional(self.served)

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Of the file that the engine's processes have written."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return cls(*(frozenset(it for warming, it in lines if warming is phase) for phase in (True, False)))


def _optional(variants: frozenset[str]) -> set[tuple[str, ...]]:
    """By kernel: the arguments that are not there."""
    found = set()
    for variant in variants:
        name, _, arguments = variant.partition(":")
        found.add((name, *(key for key, value in json.loads(arguments).items() if value == "None")))
    return found


class Recorder:
    """The launches of this process."""

    def __init__(self, path: Path) -> None:
        self.path, self.warming = path, False
        self.seen: set[tuple[bool, str]] = set()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """While the engine warms up."""
        self.warming = True
        try:
            yield
        finally:
            self.warming = False

    def note(self, variant: str) -> None:
        """Write a launch, if it is new."""
        if (self.warming, variant) not in self.seen:
            self.seen.add((self.warming, variant))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([self.warming, variant]) + "\n")


class Launched:
    """In the place of one of Triton's kernels."""

    def __init__(self, kernel: Any, recorder: Recorder) -> None:
        self.name, self.recorder = kernel.fn.__name__, recorder
        self.names = list(inspect.signature(kernel.fn).parameters)
        # Interpreted kernels keep what they were decorated with, others have it a parameter.
        given = getattr(kernel, "kwargs", None)
        if given is None:
            marked = [(it.name, it.do_not_specialize, it.do_not_specialize_on_alignment) for it in kernel.params]
            self.plain = {name for name, plain, _ in marked if plain}
            self.unaligned = {name for name, _, unaligned in marked if unaligned}
        else:
            self.plain = set(given["do_not_specialize"] or ())
            self.unaligned = set(given["do_not_specialize_on_alignment"] or ())

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.names, args, strict=False)) | kwargs
            self.recorder.note(f"{self.name}: {json.dumps({name: self._told(name, it) for name, it in given.items()})}")

        return launch

    def _told(self, name: str, value: Any) -> str:
        """What the compiler is told of an argument."""
        import torch

        if isinstance(value, torch.Tensor):
            aligned = name not in self.unaligned and value.storage_offset() * value.itemsize % 16 == 0
            return f"{value.dtype}, {'aligned' if aligned else 'anywhere'}"
        if name.startswith("stride_") or name in self.plain:
            special = "" if name in self.plain else f", {value == 1}, {value % 16 == 0}"
            return f"int{special}"
        return type(value).__name__ if isinstance(value, float) else str(value)


class WithLaunches:
    """A layer's kernel, and what a GPU would launch in its place."""

    graph_support = "decodes"

    def __init__(self, own: Any, spec: Any) -> None:
        from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet

        self.own, self.triton = own, TritonGatedDeltaNet(spec, nvidia=True, overlap=True)
        self.scratch_bytes, self.attention_compile_keys = own.scratch_bytes, self.triton.attention_compile_keys

    def __call__(self, *args: Any) -> None:
        self.triton(*args)
        self.own(*args)


def record(environ: Mapping[str, str] = os.environ) -> Recorder:
    """Have launches written from now on."""
    from importlib import import_module

    from atom_core.mixers.gated_delta_net import GatedDeltaNetMixer

    recorder = Recorder(Path(environ[VARIABLE]))
    for path, names in KERNELS.items():
        module = import_module(path)
        for name in names:
            setattr(module, name, Launched(getattr(module, name), recorder))
    select = GatedDeltaNetMixer.select_kernels

    def select_kernels(mixer: Any, kernels: Any) -> None:
        select(mixer, kernels)
        mixer.kernel = WithLaunches(mixer.kernel, mixer.layer)

    GatedDeltaNetMixer.select_kernels = select_kernels  # type: ignore[method-assign]
    return recorder
