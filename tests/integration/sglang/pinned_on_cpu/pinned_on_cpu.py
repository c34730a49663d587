"""A plug-in for SGLang that gives it data-parallel attention on a CPU, for tests: memory that no driver has pinned.

SGLang pins how many tokens the ranks have before it copies that to a device, whatever the device is. A folder with this
module and its metadata on PYTHONPATH is all it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BATCH}.prepare_mlp_sync_batch", _without_pinning, HookType.AROUND)


def _without_pinning(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    import torch

    make = torch.tensor

    def unpinned(*values: Any, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        return make(*values, **others)

    with mock.patch.object(torch, "tensor", unpinned):
        return original(*args, **named)
