"""A plug-in for SGLang that has its recorder of experts count on a CPU, for tests.

SGLang asks for an accelerator to count on, whatever the device is. A folder with this module and its metadata on
PYTHONPATH is all it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.common.get_device", _cpu, HookType.REPLACE)


def _cpu(device_id: int | None = None) -> str:
    return "cpu"
