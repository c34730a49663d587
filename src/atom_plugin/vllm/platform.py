"""vLLM's platform with two hooks more: where ``--model-impl atom`` is read.

The class is made on demand from whichever built-in platform applies and keeps its ``_enum``, so every branch that asks
"is this CUDA?" answers as before. See https://docs.vllm.ai/en/latest/design/plugin_system.html for the plug-in group.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atom_plugin.vllm import ARCHITECTURE_PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AtomPlatformMixin:
    """Routes a model to our class when the user asked for it, and only then."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Say how our models run where the user did not; vLLM asks before it fills in its own defaults."""
        super().apply_config_platform_defaults(vllm_config)  # type: ignore[misc]
        if vllm_config.model_config is None:
            return
        from atom_plugin.vllm import graphs

        if _asked_for(vllm_config):
            graphs.set_graph_defaults(vllm_config)
        else:
            graphs.take_back_graph_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Check a whole configuration; vLLM calls it again in the engine core and for each copy made for a draft.

        Raises:
            ValueError: ``--model-impl atom`` with something that our models cannot do.
        """
        # The platform's own rules first: they settle what ours look at (the CPU's block size, the compile mode).
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        if _asked_for(vllm_config):
            from atom_plugin.vllm.routing import route

            route(vllm_config)


def _asked_for(vllm_config: VllmConfig) -> bool:
    return vllm_config.model_config is not None and vllm_config.model_config.model_impl == "atom"


def __getattr__(name: str) -> type[Any]:
    """``AtomCpuPlatform`` and its like: our mixin over the built-in platform of that name.

    Raises:
        AttributeError: no active built-in platform has that name.
    """
    if name.startswith(ARCHITECTURE_PREFIX):
        from vllm.platforms import builtin_platform_plugins

        for probe in builtin_platform_plugins.values():
            module, _, class_name = (probe() or "").rpartition(".")
            if class_name and name == ARCHITECTURE_PREFIX + class_name:
                base = getattr(import_module(module), class_name)
                platform = type(name, (AtomPlatformMixin, base), {"__module__": __name__, "__doc__": base.__doc__})
                globals()[name] = platform  # one class a process: vLLM keeps state on it
                return platform
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
