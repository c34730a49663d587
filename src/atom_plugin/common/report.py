"""The table that a server logs at start-up: the chosen kernels, and why faster ones were not chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atom_core.kernels.greedy_tokens import GREEDY_TOKENS
from atom_core.kernels.request_pages import REQUEST_PAGES

if TYPE_CHECKING:
    from atom_core.kernels.select import Choice
    from atom_core.runtime import Runtime

#: Ops that samplers and attention backends use once the model is built.
_NO_LAYERS = (GREEDY_TOKENS.name, REQUEST_PAGES.name)


def startup_table(framework: str, model_class: str, attention_class: str, runtime: Runtime) -> str:
    """The table as plain text, without colours, for a server's log.

    Args:
        framework: the framework and its version.
        model_class: the core's model.
        attention_class: the adapter's attention layer.
        runtime: of the model, after it is built.
    """
    kernels = runtime.kernels
    lines = [
        f"  framework  {framework}",
        f"  model      {model_class}",
        f"  attention  {attention_class}",
        f"  device     {kernels.target}, {str(runtime.dtype).removeprefix('torch.')}",
        "  kernels",
    ]
    found = kernel_lines(kernels.choices())
    for op, wanted in kernels.unused().items():
        if op in _NO_LAYERS:
            continue
        asked_by = kernels.asked_by.get(op, "ATOM_KERNELS")
        found.append(f"{op:<19} {'-':<11} {asked_by} asks for {wanted}; no layer of this model uses it here")
    return "\n".join([*lines, *(f"    {line}" for line in found)])


def kernel_lines(choices: list[Choice]) -> list[str]:
    """One line for each choice: op, implementation, and its notes or why faster implementations were passed over."""
    lines = []
    for choice in choices:
        passed = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over)
        notes = (f"forced by {choice.asked_by}" if choice.forced else passed, choice.remark)
        note = "; ".join(it for it in notes if it)
        lines.append(f"{choice.op:<19} {choice.implementation:<11} {note}".rstrip())
    return lines
