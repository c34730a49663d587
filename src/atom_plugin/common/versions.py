"""Which versions of the frameworks and compilers are installed, and whether this package supports them.

The supported ranges are the extras of this distribution (`atom-plugin[vllm]`), read back from its own metadata.
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
    """The distribution of `package` in this environment, or None."""
    return find_installed(*_DISTRIBUTIONS.get(package, (package,)))


def installed_versions() -> dict[str, Installed | None]:
    """This package, the frameworks, and what they run on."""
    return {package: installed(package) for package in (DISTRIBUTION, *_DISTRIBUTIONS)}


def framework_line(framework: str) -> str:
    """A framework and its version, for the start-up table; an untested version is called so."""
    found = installed(framework)
    if found is None:
        return framework
    untested = f", untested (supported: {supported_range(framework)})" if why_unsupported(framework) else ""
    return f"{framework} {found.version}{untested}"
