"""A plug-in for SGLang that warms our models up on a CPU, as SGLang has it done on a GPU, for tests.

With the variable of :mod:`tests.integration.recorded_launches` it writes what is launched, too; the tests are on
PYTHONPATH then. A folder with this module and its metadata there is all it takes for SGLang to load it, in all of its
processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

WARM_UP = "sglang.srt.model_executor.runner.base_runner.BaseRunner._warmup"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder: Any = None
    if "RECORDED_LAUNCHES" in os.environ:
        from tests.integration.recorded_launches import record

        recorder = record()

    def warm_up(original: Callable[..., Any], runner: Any) -> None:
        """SGLang's own, and what it asks a model for on a GPU, once for each."""
        model_runner = runner.model_runner
        is_first = not getattr(model_runner, "_kernel_warmed_up", False)
        original(runner)
        if is_first:
            with nullcontext() if recorder is None else recorder.warm_up():
                model_runner.model.prepare_before_cuda_graph_capture(model_runner)

    HookRegistry.register(WARM_UP, warm_up, HookType.AROUND)
