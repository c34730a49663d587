"""Checks of the environment: versions, entry points and variables of both frameworks.

The checks for vLLM follow `vllm/plugins/__init__.py` and `vllm/platforms/__init__.py`: VLLM_PLUGINS filters all groups
by exact name, VLLM_TARGET_DEVICE=cpu selects the built-in platform without any plug-in, two active platform plug-ins
are an error, and of two entry points with the same name only one is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from atom_plugin.common import versions
from atom_plugin.common.settings import load_settings, unknown_variables
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import FRAMEWORKS, PLUGIN_NAME, SGLANG, VLLM, Framework
from atom_plugin.doctor.sglang import check_sglang_variables

PLATFORM_GROUP = "vllm.platform_plugins"
OURS = {group: value for framework in FRAMEWORKS for group, value in framework.entry_points.items()}
_REFUSED = "A server that is asked for our models refuses to start."


@dataclass(frozen=True)
class Plugin:
    """An entry point in one of the frameworks' plug-in groups."""

    group: str
    name: str
    value: str
    distribution: str

    @classmethod
    def of(cls, point: EntryPoint) -> Plugin:
        """The plug-in of an entry point."""
        return cls(point.group, point.name, point.value, point.dist.name if point.dist else "unknown")

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this package."""
        return OURS[self.group] == self.value


def plugins() -> tuple[Plugin, ...]:
    """The entry points in all groups; an installation that is found twice counts once."""
    return tuple(dict.fromkeys(Plugin.of(point) for group in OURS for point in entry_points(group=group)))


def check_variables(environ: Mapping[str, str], frameworks: Sequence[Framework] = FRAMEWORKS) -> Iterable[Finding]:
    """ATOM_* variables that are wrong or switch us off, and the frameworks' variables that exclude our plug-in."""
    unknown = unknown_variables(environ)
    for name, message in unknown.items():
        yield Finding(message, _REFUSED, f"Unset {name} or correct its name; `atom-plugin env` lists all.")
    try:
        settings = load_settings({name: value for name, value in environ.items() if name not in unknown})
    except ValueError as error:
        yield Finding(str(error), _REFUSED, "Correct the value; `atom-plugin env` lists all variables and their forms.")
    else:
        if settings.disable_vllm_plugin and VLLM in frameworks:
            problem = f"ATOM_DISABLE_VLLM_PLUGIN={environ['ATOM_DISABLE_VLLM_PLUGIN']} switches the plug-in off."
            yield Finding(problem, VLLM.left_out, "Unset ATOM_DISABLE_VLLM_PLUGIN.")
    if VLLM in frameworks:
        yield from _check_vllm_variables(environ)
    if SGLANG in frameworks:
        yield from check_sglang_variables(environ)


def _check_vllm_variables(environ: Mapping[str, str]) -> Iterable[Finding]:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        yield Finding(
            f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN_NAME!r}: vLLM loads only the plug-ins named there.",
            VLLM.left_out,
            f"Add it, without spaces (VLLM_PLUGINS={','.join([*filter(None, allowed.split(',')), PLUGIN_NAME])}), "
            "or unset VLLM_PLUGINS.",
        )
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        yield Finding(
            "VLLM_TARGET_DEVICE=cpu makes vLLM use its built-in CPU platform without looking at plug-ins.",
            VLLM.left_out,
            "Unset VLLM_TARGET_DEVICE: a CPU build of vLLM finds the CPU by itself.",
        )


def check_entry_points(found: Iterable[Plugin], frameworks: Sequence[Framework] = FRAMEWORKS) -> Iterable[Finding]:
    """Our entry points that are missing, or hidden by another one of the same name."""
    found = tuple(found)
    for framework in frameworks:
        for group, value in framework.entry_points.items():
            if not any(plugin.group == group and plugin.is_ours for plugin in found):
                yield Finding(
                    f"There is no entry point {PLUGIN_NAME} = {value} in {group}: {versions.DISTRIBUTION} is not "
                    "installed in this environment, or not completely.",
                    framework.left_out,
                    f"pip install --force-reinstall --no-deps {versions.DISTRIBUTION} "
                    "(from a checkout: pip install -e .)",
                )
        for plugin in found:
            if plugin.group in framework.entry_points and plugin.name == PLUGIN_NAME and not plugin.is_ours:
                yield Finding(
                    f"The distribution {plugin.distribution} also has an entry point {PLUGIN_NAME} in {plugin.group} "
                    f"({plugin.value}).",
                    f"{framework.title} loads only one of the two: the last one that it finds.",
                    f"pip uninstall {plugin.distribution}",
                )


def check_platforms(found: Iterable[Plugin], environ: Mapping[str, str]) -> Iterable[Finding]:
    """Other active platform plug-ins."""
    allowed = environ.get("VLLM_PLUGINS")
    others = [
        plugin
        for plugin in found
        if plugin.group == PLATFORM_GROUP
        and plugin.name != PLUGIN_NAME
        and (allowed is None or plugin.name in allowed.split(","))
        and _is_active(plugin)
    ]
    for plugin in others:
        yield Finding(
            f"The distribution {plugin.distribution} brings another active platform plug-in, {plugin.name!r}.",
            "vLLM refuses to start, with or without `--model-impl atom`: only one platform plug-in can be active.",
            f"Name the plug-ins to load (VLLM_PLUGINS={PLUGIN_NAME}), or pip uninstall {plugin.distribution}.",
        )


def _is_active(plugin: Plugin) -> bool:
    """Whether vLLM would count this platform plug-in as active: it returns a path."""
    try:
        return EntryPoint(plugin.name, plugin.value, plugin.group).load()() is not None
    except Exception:  # noqa: BLE001
        # vLLM's own rule: a plug-in that raises anything is not active.
        return False


def installed_frameworks() -> tuple[Framework, ...]:
    """The installed frameworks; all of them if none is installed."""
    return tuple(framework for framework in FRAMEWORKS if versions.installed(framework.package)) or FRAMEWORKS


def check_versions(frameworks: Sequence[Framework] = FRAMEWORKS, *, allow_untested: bool = False) -> Iterable[Finding]:
    """None of `frameworks` is installed, or one is outside the supported range and not allowed."""
    found = [(framework, versions.installed(framework.package)) for framework in frameworks]
    if not any(version for _, version in found):
        titles = [framework.title for framework in frameworks]
        yield Finding(
            f"Neither {' nor '.join(titles)} is installed in this environment."
            if len(titles) > 1
            else f"{titles[0]} is not installed in this environment.",
            "There is no server that could run our models.",
            " or ".join(f'pip install "{versions.DISTRIBUTION}[{framework.package}]"' for framework in frameworks),
        )
    for framework, version in found:
        if version is None or allow_untested:
            continue
        try:
            reason, remedy = versions.why_unsupported(framework.package), versions.remedy(framework.package)
        except ValueError as error:
            reason, _, remedy = str(error).rpartition(": ")
        if reason:
            yield Finding(f"{reason}.", framework.refused, f"{remedy}.")
