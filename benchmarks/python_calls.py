"""The Python calls of one decode step per layer, and the files of ours that a step crosses.

    python -m benchmarks.python_calls CHECKPOINT
    python -m benchmarks.python_calls CHECKPOINT --framework vllm

Counted by `sys.setprofile` during the model's call, on a CPU. On a GPU, graphs replay without these calls; prefill and
steps without graphs wait for them. With vLLM the engine runs in this process, eagerly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

#: What a path is told by, behind one of these.
_ROOTS = ("/src/", "/site-packages/")

#: Where kernels are: the core's, and those of vLLM that the adapter contributes.
KERNELS = ("atom_core/kernels/", "atom_plugin/vllm/cpu_kernels.py")


@dataclass
class Calls:
    """Calls by file and function, of the last of several runs."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, counted anew each time."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts.clear()
            sys.setprofile(self._note)
            try:
                return run(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return counted

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            name = next((part for root in _ROOTS if (part := code.co_filename.partition(root)[2])), code.co_filename)
            self.counts[name, code.co_qualname] += 1

    def a_layer(self, num_layers: int) -> dict[tuple[str, str], float]:
        """Those that each layer makes."""
        return {key: count / num_layers for key, count in self.counts.items() if count >= num_layers}

    def files(self) -> list[str]:
        """Ours, kernels apart, that the step crosses."""
        names = {name for name, _ in self.counts if name.startswith(("atom_core/", "atom_plugin/"))}
        return sorted(name for name in names if not name.startswith(KERNELS))


def standalone(folder: Path) -> tuple[Calls, int]:
    """A step of the core's own runner."""
    from atom_core.standalone import Runner

    runner, calls = Runner(folder), Calls()
    caches = runner.caches(1)
    runner.step(caches, [0], [[1, 2, 3, 4]])
    runner.model.forward = calls.watched(runner.model.forward)  # type: ignore[method-assign]
    for cached in (4, 5):
        runner.step(caches, [cached], [[5]])
    return calls, runner.config.num_layers


def vllm(folder: Path) -> tuple[Calls, int]:
    """A step of vLLM's engine."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm, calls = LLM(str(folder), model_impl="atom", enforce_eager=True, kv_cache_memory_bytes=2**26), Calls()

    def watch(model: Any) -> int:
        model.forward = calls.watched(model.forward)
        return int(model.core.config.num_layers)

    num_layers = llm.apply_model(watch)[0]
    llm.generate(["12 + 5 ="], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    return calls, num_layers


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--framework", choices=("none", "vllm"), default="none")
    given = parser.parse_args()
    calls, num_layers = (vllm if given.framework == "vllm" else standalone)(given.folder)
    a_layer = calls.a_layer(num_layers)
    ours = {key: count for key, count in a_layer.items() if key[0].startswith("atom_")}
    kernels = sum(count for (name, _), count in ours.items() if name.startswith(KERNELS))
    for (name, function), count in sorted(ours.items(), key=lambda it: -it[1]):
        print(f"{count:5.1f}  {name}  {function}")
    own = sum(ours.values()) - kernels
    print(f"{sum(a_layer.values()):.1f} calls a layer: {own:.1f} of ours, {kernels:.1f} in our kernels")
    print(f"{len(calls.files())} files of ours, kernels apart: {', '.join(calls.files())}")


if __name__ == "__main__":
    main()
