"""What a case of the matrix is, and how its two runs are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Log probabilities in float32 by two implementations, each over a small model's few layers.
TOLERANCE = 2e-4
OUTCOMES = ("equal", "refused", "native fails", "DIFFERS", "FAILS", "SERVED")
FAULTS = ("DIFFERS", "FAILS", "SERVED")


@dataclass(frozen=True, eq=False)
class Case:
    """One line of the matrix.

    Args:
        name: what is tried, as a user would write it.
        options: arguments of the engine.
        asks: requests, in turn, each a mapping of the framework's request parameters.
        family: of the trained checkpoint, or the name of one that the runner makes.
        environ: variables, read by the framework when it starts.
        refused: words of the one line by which ours refuses; None: both serve alike.
        native_is_wrong: why native's answers are no measure, and in which test ours are compared with another's.
        tolerance: by how much log probabilities may differ, absolutely below 1 and else relatively.
        sample: whether it is among those that the ordinary tests run.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    asks: Sequence[Mapping[str, Any]] = ({},)
    family: str = "qwen3"
    environ: Mapping[str, str] = field(default_factory=dict)
    refused: Sequence[str] | None = None
    native_is_wrong: str = ""
    tolerance: float = TOLERANCE
    sample: bool = False

    def __str__(self) -> str:
        return self.name

    def as_json(self) -> dict[str, Any]:
        """What a process is given."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """How a case went, and what a person should know of it."""

    outcome: str
    told: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether our models fall short of native."""
        return self.outcome in FAULTS


def judge(case: Case, native: Mapping[str, Any], ours: Mapping[str, Any]) -> Verdict:
    """Compare two runs: each has ``answers``, or an ``error`` in one line and a ``log``."""
    if case.refused is not None:
        if "error" not in ours:
            return Verdict("SERVED", f"ours served what it should refuse ({', '.join(case.refused)})")
        missing = [word for word in case.refused if word not in ours["error"]]
        if missing or "\n" in ours["error"]:
            return Verdict("FAILS", f"refused, but without {missing}: {ours['error']}")
        return Verdict("refused", ours["error"])
    if case.native_is_wrong and "error" not in ours:
        return Verdict("native fails", case.native_is_wrong)
    if "error" in native and "error" in ours:
        return Verdict("native fails", f"native: {native['error']} | ours: {ours['error']}")
    if "error" in native:
        return Verdict("native fails", f"native: {native['error']} | ours serves it")
    if "error" in ours:
        return Verdict("FAILS", ours["error"])
    if not ours["ours"]:
        return Verdict("FAILS", "the model that served is not ours")
    told = different(native["answers"], ours["answers"], case.tolerance)
    return Verdict("DIFFERS", told) if told else Verdict("equal")


def different(native: Any, ours: Any, tolerance: float, place: str = "answers") -> str:
    """Where two answers differ, or nothing; floating-point numbers may by ``tolerance``."""
    if isinstance(native, float) and isinstance(ours, float | int):
        near = native == ours or abs(native - ours) <= tolerance * max(1.0, abs(native))
        return "" if near else f"{place}: native {native}, ours {ours}"
    if isinstance(native, dict) and isinstance(ours, dict):
        if native.keys() != ours.keys():
            return f"{place}: native has {sorted(native)}, ours {sorted(ours)}"
        pairs = [(f"{place}.{key}", value, ours[key]) for key, value in native.items()]
    elif isinstance(native, list) and isinstance(ours, list):
        if len(native) != len(ours):
            return f"{place}: native has {len(native)}, ours {len(ours)}"
        pairs = [(f"{place}[{at}]", *pair) for at, pair in enumerate(zip(native, ours, strict=True))]
    else:
        return "" if native == ours else f"{place}: native {native!r}, ours {ours!r}"
    return next((found for where, a, b in pairs if (found := different(a, b, tolerance, where))), "")
