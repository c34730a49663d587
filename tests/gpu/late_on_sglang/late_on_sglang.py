"""A plug-in for SGLang that prints which Triton kernels of ours are compiled while requests are served, for tests.

A folder with this module and its metadata on PYTHONPATH is all it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations

import sys
from typing import Any

LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOOP, _watch, HookType.BEFORE)


def _watch(*args: object) -> None:
    """Watch from now on: the engine is ready."""
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def note(**about: Any) -> Any:
        if about["fn"].module.startswith("atom_core"):
            _print(f"compiled while requests waited: {about.get('repr', about['fn'].name)}")
        return None if before is None else before(**about)

    knobs.runtime.jit_post_compile_hook = note
    _print("late compiles are watched")


def _print(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()
