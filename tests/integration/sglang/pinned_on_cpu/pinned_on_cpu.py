"""A plug-in for SGLang that has it do without pinned memory on a CPU, for tests: no driver pins any there.

SGLang pins how many tokens the ranks of data-parallel attention have before it copies that to a device, and where it
keeps the experts of each token, whatever the device is. A folder with this module and its metadata on PYTHONPATH is all
it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

KEPT = "sglang.srt.state_capturer.base.BaseHostCache"
BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BATCH}.prepare_mlp_sync_batch", _without_pinning, HookType.AROUND)
    HookRegistry.register(f"{KEPT}.__init__", _of_plain_memory, HookType.AROUND)


def _of_plain_memory(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    import torch
    from sglang.srt.state_capturer import base

    def allocate(shape: Any, dtype: torch.dtype, **others: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    with mock.patch.dict(base.ALLOC_MEMORY_FUNCS, {"cpu": allocate}):
        return original(*args, **named)


def _without_pinning(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    import torch

    make = torch.tensor

    def unpinned(*values: Any, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        return make(*values, **others)

    with mock.patch.object(torch, "tensor", unpinned):
        return original(*args, **named)
