"""The two entry points that vLLM calls; importing this module imports neither torch nor vLLM.

vLLM calls `register_platform` twice while it is itself being imported, and `register_models` in each of its processes,
for every user of an environment that has this package. So both are cheap, have no effect that `--model-impl auto` could
notice, and do not raise: a setting that cannot be read is logged here, and refused with an error by the platform once
`--model-impl atom` is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

# A child of vLLM's own logger, so that its configuration and `VLLM_LOGGING_LEVEL` apply.
logger = logging.getLogger("vllm.atom_plugin")

ARCHITECTURE_PREFIX = "Atom"


def _disabled() -> bool:
    from atom_plugin.common.settings import load_settings

    try:
        return load_settings().disable_vllm_plugin
    except ValueError as error:
        logger.warning("atom-plugin: %s `--model-impl atom` will refuse to start.", error)
        return False


def register_platform() -> str | None:
    """The path of our subclass of the built-in platform that applies here, or None to leave vLLM alone.

    `vllm.platforms.cpu.CpuPlatform` becomes `atom_plugin.vllm.platform.AtomCpuPlatform`. Where no built-in platform
    applies, or more than one does, vLLM's own rules and messages stand.
    """
    if _disabled():
        return None
    from vllm.platforms import builtin_platform_plugins

    active = [path for path in (_probe(plugin) for plugin in builtin_platform_plugins.values()) if path is not None]
    if len(active) != 1:
        return None
    return f"atom_plugin.vllm.platform.{ARCHITECTURE_PREFIX}{active[0].rpartition('.')[2]}"


def _probe(plugin: Callable[[], str | None]) -> str | None:
    try:
        return plugin()
    except Exception:
        # vLLM's own rule: a probe that fails, in whatever way, means that its platform is not there.
        logger.debug("atom-plugin: a built-in platform's probe failed", exc_info=True)
        return None


def register_models() -> None:
    """Register each of our classes lazily under a name of its own, so that no stock architecture is touched."""
    if _disabled():
        return
    from vllm import ModelRegistry

    from atom_core.models.registry import DRAFTS, supported_architectures

    registered = ModelRegistry.get_supported_archs()
    for architecture in supported_architectures():
        name = ARCHITECTURE_PREFIX + architecture
        if name not in registered:
            ModelRegistry.register_model(name, f"atom_plugin.vllm.models:{name}")
    for _, draft in DRAFTS.values():
        name = ARCHITECTURE_PREFIX + draft
        if name not in registered:
            ModelRegistry.register_model(name, f"atom_plugin.vllm.drafts:{name}")
