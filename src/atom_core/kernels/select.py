"""Implementations of ops: whether each can run a call, which one is selected, and the record of the selection.

Selection happens once, when a model is built. The first implementation in the target's order whose ``supports``
returns None wins. A forced implementation that cannot run is an error, so nothing is replaced silently.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, cast

import torch

SpecT = TypeVar("SpecT", bound=Hashable)
KernelT = TypeVar("KernelT")

DeviceKind = Literal["cpu", "cuda", "rocm"]

#: The order in which implementations are tried, by kind of device. Adapters contribute "framework" and the names with
#: "flash_attention_3". "torch" is torch's faster way on a CPU, "scaled_mm" its FP8 product on a GPU. "widened" computes
#: in float32 on CPUs without 16-bit instructions. "separate" runs the ops that a fused op consists of one by one, and
#: "routed" runs shared experts as routed ones.
PRIORITY: Mapping[DeviceKind, tuple[str, ...]] = {
    "rocm": ("aiter", "aiter_shuffled", "triton", "framework", "scaled_mm", "reference", "routed", "separate"),
    "cuda": ("triton_and_flash_attention_3", "triton", "framework", "scaled_mm", "reference", "routed", "separate"),
    "cpu": ("framework", "torch", "widened", "reference", "separate"),
}


@dataclass(frozen=True)
class Target:
    """The device that kernels are selected for: its kind and its architecture ("gfx942", "sm90", "x86_64")."""

    kind: DeviceKind
    arch: str

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target for ``device``."""
        if device.type == "cuda":
            if torch.version.hip:
                name: str = torch.cuda.get_device_properties(device).gcnArchName
                return cls("rocm", name.partition(":")[0])
            major, minor = torch.cuda.get_device_capability(device)
            return cls("cuda", f"sm{major}{minor}")
        return cls("cpu", platform.machine())

    @property
    def is_hopper(self) -> bool:
        """Whether it is one of NVIDIA's Hopper GPUs, such as an H100 or H200."""
        return (self.kind, self.arch) == ("cuda", "sm90")

    def __str__(self) -> str:
        return f"{self.kind} ({self.arch})"


@dataclass(frozen=True)
class Implementation(Generic[SpecT, KernelT]):
    """One way to run an op.

    ``supports`` returns None, or one sentence saying why it cannot run this call. ``build`` makes the kernel.
    ``remark`` returns what a user should know if it is selected. None of them may touch a device: they run before a
    model has weights.
    """

    name: str
    supports: Callable[[SpecT, Target], str | None]
    build: Callable[[SpecT, Target], KernelT]
    remark: Callable[[Target], str | None] = lambda target: None


@dataclass(frozen=True)
class Op(Generic[SpecT, KernelT]):
    """An op and its own implementations; an adapter may contribute more to a :class:`KernelSet`."""

    name: str
    implementations: tuple[Implementation[SpecT, KernelT], ...]


@dataclass(frozen=True)
class Choice:
    """One row of the start-up table."""

    op: str
    implementation: str
    forced: bool
    passed_over: tuple[tuple[str, str], ...]
    """(implementation, why it cannot run) for each earlier one in the order."""
    remark: str | None = None
    """The implementation's remark."""
    asked_by: str = "ATOM_KERNELS"
    """The setting that forced it, if any did."""


@dataclass
class KernelSet:
    """The kernels of one model on one target.

    Args:
        target: the device.
        ops: every op; names in ``forced`` are checked against it.
        forced: implementation by op name, from ``ATOM_KERNELS`` or the op's own setting.
        contributed: the framework's own kernels, by op name.
        excluded: why an implementation is not used unless forced, by (op name, implementation).

    Raises:
        ValueError: ``forced`` names an unknown op, or an implementation that the op does not have.
    """

    target: Target
    ops: Sequence[Op[Hashable, object]]
    forced: Mapping[str, str] = field(default_factory=dict)
    contributed: Mapping[str, Implementation[Hashable, object]] = field(default_factory=dict)
    excluded: Mapping[tuple[str, str], str] = field(default_factory=dict)
    asked_by: Mapping[str, str] = field(default_factory=dict)
    """The setting that an entry of ``forced`` comes from, by op name, unless it is ``ATOM_KERNELS``."""
    _choices: dict[tuple[str, Hashable], tuple[Implementation[Hashable, object], Choice]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        known = {op.name: op for op in self.ops}
        for name in self.contributed:
            assert name in known, f"the adapter contributes a kernel for an op that does not exist: {name}"
        for name, wanted in self.forced.items():
            if name not in known:
                raise ValueError(f"ATOM_KERNELS names an unknown op {name!r}; ops: {', '.join(sorted(known))}.")
            names = self._names(known[name])
            if wanted not in names:
                raise ValueError(
                    f"ATOM_KERNELS asks for {name}={wanted}, which does not exist; "
                    f"implementations of {name} here: {', '.join(names)}."
                )

    def select(self, op: Op[SpecT, KernelT], spec: SpecT) -> KernelT:
        """A new kernel for one call site.

        Args:
            op: the op.
            spec: the call; equal specs are decided once.

        Raises:
            ValueError: the forced implementation cannot run it, or none can.
        """
        return cast(KernelT, self._chosen(op, spec).build(spec, self.target))

    def chosen(self, op: Op[SpecT, KernelT], spec: SpecT) -> str:
        """The name of the implementation that :meth:`select` builds; raises the same errors."""
        return self._chosen(op, spec).name

    def _chosen(self, op: Op[SpecT, KernelT], spec: SpecT) -> Implementation[Hashable, object]:
        key = (op.name, spec)
        if key not in self._choices:
            self._choices[key] = self._decide(cast("Op[Hashable, object]", op), spec)
        return self._choices[key][0]

    def kernels(self) -> Iterator[object]:
        """One kernel for each spec of each implementation that was chosen so far."""
        for (_, spec), (implementation, _) in self._choices.items():
            yield implementation.build(spec, self.target)

    def choices(self) -> list[Choice]:
        """The selections so far, without repetitions, in the order of the ops."""
        order = {op.name: index for index, op in enumerate(self.ops)}
        rows = dict.fromkeys(choice for _, choice in self._choices.values())
        return sorted(rows, key=lambda row: order[row.op])

    def unused(self) -> dict[str, str]:
        """The entries of ``forced`` whose op nothing has asked for so far."""
        used = {op for op, _ in self._choices}
        return {op: wanted for op, wanted in self.forced.items() if op not in used}

    def _names(self, op: Op[Hashable, object]) -> list[str]:
        return [implementation.name for implementation in self._in_order(op)]

    def _in_order(self, op: Op[Hashable, object]) -> list[Implementation[Hashable, object]]:
        available: Iterable[Implementation[Hashable, object]] = op.implementations
        if op.name in self.contributed:
            available = (*available, self.contributed[op.name])
        priority = PRIORITY[self.target.kind]
        # Implementations outside the target's order (Triton on a CPU) can be forced; they say why they cannot run.
        return sorted(available, key=lambda it: priority.index(it.name) if it.name in priority else len(priority))

    def _decide(self, op: Op[Hashable, object], spec: Hashable) -> tuple[Implementation[Hashable, object], Choice]:
        wanted = self.forced.get(op.name)
        passed_over: list[tuple[str, str]] = []
        for implementation in self._in_order(op):
            if wanted is not None and implementation.name != wanted:
                continue
            reason = None if wanted else self.excluded.get((op.name, implementation.name))
            reason = reason or implementation.supports(spec, self.target)
            if reason is None:
                remark, asked_by = implementation.remark(self.target), self.asked_by.get(op.name, "ATOM_KERNELS")
                choice = Choice(op.name, implementation.name, wanted is not None, tuple(passed_over), remark, asked_by)
                return implementation, choice
            if wanted is not None:
                setting = self.asked_by.get(op.name)
                remedy = f"Unset {setting}" if setting else f"Leave {op.name} out of ATOM_KERNELS"
                raise ValueError(
                    f"{setting or 'ATOM_KERNELS'} asks for {op.name}={wanted}, which cannot run on {self.target}: "
                    f"{reason} {remedy} to have one chosen."
                )
            passed_over.append((implementation.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        raise ValueError(f"No implementation of {op.name} can run {spec} on {self.target}. {reasons}")


def always(spec: Hashable, target: Target) -> str | None:
    """``supports`` of a reference implementation: plain torch runs everywhere."""
    return None


def only_on_cpu(spec: Hashable, target: Target) -> str | None:
    """``supports`` of implementations that use the torch ops that are fastest on a CPU."""
    return None if target.kind == "cpu" else "It is made of the torch ops that are quickest on a CPU."
