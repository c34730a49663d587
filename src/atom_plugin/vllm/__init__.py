"""The plug-in for vLLM: two entry points, and a platform with hooks for ``--model-impl atom``.

vLLM calls `register_platform` twice while vLLM is being imported, and `register_models` in each of its processes. It
does so for every user of an environment with this package, and for every version of vLLM. So this module imports
nothing before it is needed, and raises nothing unless ``--model-impl atom`` is given. Without the flag, settings that
cannot be read and modules that cannot be imported are only logged.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from atom_plugin import ALLOW_UNTESTED, UnsupportedFramework, import_failure, refusal, why_unsupported

if TYPE_CHECKING:
    from types import ModuleType

    from vllm.config import VllmConfig

    from atom_plugin.common.settings import Settings

# A child of vLLM's own logger, so that its configuration and `VLLM_LOGGING_LEVEL` apply.
logger = logging.getLogger("vllm.atom_plugin")

ARCHITECTURE_PREFIX = "Atom"
MODEL_IMPL = "atom"
_ASKED = f"--model-impl {MODEL_IMPL}"


def _settings() -> Settings | None:
    """The ``ATOM_*`` variables; None if they cannot be read, which ``--model-impl atom`` then refuses."""
    try:
        from atom_plugin.common.settings import load_settings

        return load_settings()
    except ImportError:
        logger.debug("atom-plugin: its settings cannot be imported", exc_info=True)
    except ValueError as error:
        logger.warning("atom-plugin: %s `%s` will refuse to start.", error, _ASKED)
    return None


def _disabled() -> bool:
    settings = _settings()
    return settings is not None and settings.disable_vllm_plugin


def _refusal() -> str | None:
    """Why ``--model-impl atom`` does not run with this version of vLLM; None if it does."""
    settings = _settings()
    if settings is not None and settings.allow_untested_framework:
        return None
    try:
        return refusal("vllm", _ASKED)
    except ValueError as error:  # this package's own metadata is missing
        return f"{_ASKED} cannot be served: {error}"


def register_platform() -> str | None:
    """The path of our subclass of the active built-in platform, or None to change nothing in vLLM.

    `vllm.platforms.cpu.CpuPlatform` becomes `atom_plugin.vllm.AtomCpuPlatform`. If no built-in platform is active, or
    several are, vLLM applies its own rules.
    """
    if _disabled():
        return None
    try:
        from vllm.platforms import builtin_platform_plugins
    except ImportError as error:
        logger.warning("%s", import_failure("vllm", _ASKED, error))
        return None
    active = [path for path in (_probe(plugin) for plugin in builtin_platform_plugins.values()) if path is not None]
    if len(active) != 1:
        return None
    return f"{__name__}.{ARCHITECTURE_PREFIX}{active[0].rpartition('.')[2]}"


def _probe(plugin: Callable[[], str | None]) -> str | None:
    try:
        return plugin()
    except Exception:
        # vLLM's own rule: if a probe raises anything, its platform is not available.
        logger.debug("atom-plugin: a built-in platform's probe failed", exc_info=True)
        return None


def register_models() -> None:
    """Register each of our classes lazily under its own name, so that vLLM's architectures stay unchanged."""
    if _disabled():
        _warn_of_vllms_own_model("ATOM_DISABLE_VLLM_PLUGIN is set")
        return
    if _refusal() is not None:
        return
    try:
        from vllm import ModelRegistry
        from vllm.platforms import current_platform

        from atom_core.models.registry import DRAFTS, supported_architectures
    except ImportError:
        logger.debug("atom-plugin: no model is registered", exc_info=True)
        return

    if not isinstance(current_platform, AtomPlatformMixin):
        found = type(current_platform).__name__
        _warn_of_vllms_own_model(f"vLLM's platform is {found} and not ours (VLLM_TARGET_DEVICE=cpu is one cause)")
    registered = ModelRegistry.get_supported_archs()
    for architecture in supported_architectures():
        name = ARCHITECTURE_PREFIX + architecture
        if name not in registered:
            ModelRegistry.register_model(name, f"atom_plugin.vllm.models:{name}")
    for draft in dict.fromkeys(draft for _, draft in DRAFTS.values()):
        name = ARCHITECTURE_PREFIX + draft
        if name not in registered:
            ModelRegistry.register_model(name, f"atom_plugin.vllm.drafts:{name}")


def _warn_of_vllms_own_model(why: str) -> None:
    if multiprocessing.parent_process() is None:  # once a server
        logger.warning("%s: atom-plugin is not used, and with %s vLLM serves its own model.", why, _ASKED)


class AtomPlatformMixin:
    """Routes a model to our class if the user asked for it.

    It is combined on demand with the active built-in platform and keeps that platform's ``_enum``, so checks such as
    ``is_cuda()`` are unchanged. See https://docs.vllm.ai/en/latest/design/plugin_system.html for the plug-in group.
    Each hook passes all its arguments on, so that a version of vLLM with other arguments still serves its own models.
    """

    @classmethod
    def pre_register_and_update(cls, parser: Any = None, *args: Any, **kwargs: Any) -> None:
        """Refuse ``--model-impl atom`` on an unsupported vLLM as the command line is parsed, which prints one line."""
        super().pre_register_and_update(parser, *args, **kwargs)  # type: ignore[misc]
        if parser is not None and (reason := _refusal()) is not None:
            _refuse_argument(parser, reason)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Refuse what our models do not support, and set our defaults, before vLLM fills in its own.

        Raises:
            UnsupportedFramework: ``--model-impl atom`` with a version of vLLM that is not supported.
            ValueError: ``--model-impl atom`` with something that our models do not support.
        """
        asked = _asked_for(vllm_config)
        if asked:
            if (reason := _refusal()) is not None:
                raise UnsupportedFramework(reason)
            if untested := why_unsupported("vllm"):
                logger.warning("%s: %s. It runs, untested, because %s is set.", _ASKED, untested, ALLOW_UNTESTED)
            # Before the platform's defaults, which look the same as the user's settings.
            _imported("routing").refuse(vllm_config)
        super().apply_config_platform_defaults(vllm_config, *args, **kwargs)  # type: ignore[misc]
        if asked:
            _imported("graphs").set_graph_defaults(vllm_config)
        elif (graphs := sys.modules.get(f"{__name__}.graphs")) is not None:
            # This process has served one of our models before.
            graphs.restore_graph_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Check a complete configuration. vLLM calls it again in the engine core and for each copy for a draft.

        Raises:
            ValueError: ``--model-impl atom`` with something that our models do not support.
            UnsupportedFramework: see :meth:`apply_config_platform_defaults`.
        """
        # The platform's own rules come first: they set values that ours read (the CPU's block size, the compile mode).
        super().check_and_update_config(vllm_config, *args, **kwargs)  # type: ignore[misc]
        if _asked_for(vllm_config):
            _imported("routing").route(vllm_config)


def _asked_for(vllm_config: VllmConfig) -> bool:
    return getattr(getattr(vllm_config, "model_config", None), "model_impl", None) == MODEL_IMPL


def _imported(module: str) -> ModuleType:
    """A module of this adapter.

    Raises:
        UnsupportedFramework: it cannot be imported with this vLLM.
    """
    try:
        return import_module(f"{__name__}.{module}")
    except (ImportError, AttributeError) as error:
        raise UnsupportedFramework(import_failure("vllm", _ASKED, error)) from error


def _refuse_argument(parser: Any, reason: str) -> None:
    """Make ``parser`` refuse our ``--model-impl`` as it refuses any invalid argument."""
    import argparse

    def checked(value: str) -> str:
        if value == MODEL_IMPL:
            raise argparse.ArgumentTypeError(reason)
        return value

    # Argparse has no public access to an option that other code has added.
    for action in getattr(parser, "_actions", ()):
        if "--model-impl" in action.option_strings:
            action.type = checked


def __getattr__(name: str) -> type[Any]:
    """``AtomCpuPlatform`` and the like: our mixin over the built-in platform of that name.

    Raises:
        AttributeError: no active built-in platform has that name.
    """
    if name.startswith(ARCHITECTURE_PREFIX):
        from vllm.platforms import builtin_platform_plugins

        for probe in builtin_platform_plugins.values():
            module, _, class_name = (_probe(probe) or "").rpartition(".")
            if class_name and name == ARCHITECTURE_PREFIX + class_name:
                base = getattr(import_module(module), class_name)
                platform = type(name, (AtomPlatformMixin, base), {"__module__": __name__, "__doc__": base.__doc__})
                globals()[name] = platform  # one class a process: vLLM keeps state on it
                return platform
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
