"""The installed versions of frameworks and compilers, and whether this package supports them.

The supported ranges are those of this distribution's extras (`atom-plugin[vllm]`), read from its metadata.
"""

from __future__ import annotations

from types import MappingProxyType

from atom_plugin import (
    DISTRIBUTION,
    FRAMEWORK_DISTRIBUTIONS,
    Installed,
    find_installed,
    remedy,
    supported_range,
    why_unsupported,
)

__all__ = [
    "DISTRIBUTION",
    "Installed",
    "framework_line",
    "installed",
    "installed_versions",
    "remedy",
    "supported_range",
    "why_unsupported",
]

_DISTRIBUTIONS = MappingProxyType(
    {
        **FRAMEWORK_DISTRIBUTIONS,
        "torch": ("torch",),
        "triton": ("triton",),
        "aiter": ("amd-aiter", "aiter"),
        "transformers": ("transformers",),
    }
)


def installed(package: str) -> Installed | None:
    """The installed distribution of `package`, or None."""
    return find_installed(*_DISTRIBUTIONS.get(package, (package,)))


def installed_versions() -> dict[str, Installed | None]:
    """This package, the frameworks and their libraries."""
    return {package: installed(package) for package in (DISTRIBUTION, *_DISTRIBUTIONS)}


def framework_line(framework: str) -> str:
    """A framework and its version for the start-up table, with a note if the version is untested."""
    found = installed(framework)
    if found is None:
        return framework
    untested = f", untested (supported: {supported_range(framework)})" if why_unsupported(framework) else ""
    return f"{framework} {found.version}{untested}"
