"""The doctor's report: what is installed, and what was found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atom_plugin.common.versions import DISTRIBUTION, Installed
from atom_plugin.doctor.environment import Plugin
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import Framework

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from atom_core.kernels.select import Target


def version_table(installed: Mapping[str, Installed | None], supported: Mapping[str, str]) -> Table:
    """The installed versions, and the supported versions of the frameworks."""
    from rich.table import Table

    table = Table("Package", "Installed", "Supported", title="Versions", title_justify="left")
    for package, found in installed.items():
        name = package if found is None or found.distribution == package else f"{package} ({found.distribution})"
        table.add_row(name, found.version if found else "-", supported.get(package, ""))
    return table


def plugin_table(plugins: Iterable[Plugin]) -> Table:
    """The entry points in the frameworks' groups."""
    from rich.table import Table

    table = Table("Group", "Name", "Entry point", "Distribution", title="Plug-ins", title_justify="left")
    for plugin in plugins:
        table.add_row(plugin.group, plugin.name, plugin.value, plugin.distribution)
    return table


def this_device() -> Target:
    """The device for which kernels are chosen on this machine."""
    import torch

    from atom_core.kernels.select import Target

    return Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def kernel_table(target: Target) -> Table:
    """The implementations of each op, in the order of preference on ``target``."""
    from rich.table import Table

    from atom_core.kernels import OPS
    from atom_core.kernels.select import PRIORITY

    table = Table("Op", "Implementations, first choice first", title=f"Kernels on {target}", title_justify="left")
    for op in OPS:
        names = {implementation.name for implementation in op.implementations}
        table.add_row(op.name, ", ".join(name for name in PRIORITY[target.kind] if name in names))
    table.caption = "The server's own kernels join these when a model is built; its log then shows the choice."
    table.caption_justify = "left"
    return table


def finding_lines(findings: Iterable[Finding]) -> Iterable[RenderableType]:
    """Each finding in three lines: the problem, its consequence, what to change."""
    from rich.text import Text

    for number, finding in enumerate(findings, start=1):
        yield Text.assemble((f"{number}. {finding.problem}", "bold red"))
        yield Text(f"   What happens: {finding.consequence}")
        yield Text(f"   What to do:   {finding.remedy}")


def verdict(count: int, frameworks: Iterable[Framework]) -> str:
    """The last line; without findings, one line for each framework."""
    if count:
        return f"{count} finding{'s' if count > 1 else ''}: see above what to change."
    return "\n".join(
        f"All well: with {framework.asked}, {framework.title} will run the models of {DISTRIBUTION}."
        for framework in frameworks
    )
