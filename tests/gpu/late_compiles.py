"""vLLM's offline.py that fails where a Triton kernel of ours is compiled while an engine answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
    if late:
        sys.exit("compiled while requests waited:\n" + "\n".join(late))
