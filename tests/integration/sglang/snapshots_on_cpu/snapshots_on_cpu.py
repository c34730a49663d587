"""A plug-in for SGLang's pool of states on a CPU, for tests: it has copies for prefixes there, and clears nothing.

SGLang has `--mamba-radix-cache-strategy extra_buffer` on accelerators alone, and pins memory for it whatever the device
is. It has drafts on a CPU only without its overlap schedule; here it has them with it. What it would fill with zeros
for a new request is filled with NaN here, as another request may have left it. A folder with this module and its
metadata on PYTHONPATH is all it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

SUPPORTED = "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer"
OVERLAP = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
DECODE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"
CLEAR = "sglang.srt.mem_cache.memory_pool.MambaPool.clear_slots"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SUPPORTED, _supported, HookType.REPLACE)
    HookRegistry.register(OVERLAP, _nothing, HookType.REPLACE)
    HookRegistry.register(DECODE, _without_pinning, HookType.AROUND)
    HookRegistry.register(CLEAR, _fill_with_nan, HookType.REPLACE)


def _supported() -> bool:
    return True


def _nothing(server_args: Any) -> None:
    """Leave the schedule as it was asked for."""


def _without_pinning(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    import torch

    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor):
        return original(*args, **named)


def _fill_with_nan(pool: Any, slots: Any) -> None:
    for states in (*pool.mamba_cache.conv, pool.mamba_cache.temporal):
        states.index_fill_(1, slots.long(), float("nan"))
