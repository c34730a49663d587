"""vLLM's offline.py that prints in the end which Triton kernels of ours were compiled while an engine answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__)
_LINE = "compiled while requests waited: "


def late_compiles(log: str) -> list[str]:
    """The kernels that a process with this log compiled once its first engine was ready."""
    (line,) = (line for line in log.splitlines() if _LINE in line)
    found: list[str] = json.loads(line.partition(_LINE)[2])
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "vllm"))
    import offline
    from triton import knobs

    late: list[str] = []
    describe = offline._describe

    def describe_and_watch(worker: Any) -> dict[str, Any]:
        """The first thing that a ready engine is asked."""
        before = knobs.runtime.jit_post_compile_hook

        def note(**about: Any) -> Any:
            if about["fn"].module.startswith("atom_core"):
                late.append(str(about.get("repr", about["fn"].name)))
            return None if before is None else before(**about)

        knobs.runtime.jit_post_compile_hook = note
        return describe(worker)

    offline._describe = describe_and_watch
    offline.main()
    sys.stdout.write(f"\n{_LINE}{json.dumps(late)}\n")
