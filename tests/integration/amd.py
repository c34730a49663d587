"""This CPU as one of AMD's GPUs: what both frameworks' processes do before they serve, to choose kernels as on one.

Kernels are chosen for the GPU that GPU_ARCHS names, and aiter is the fake of tests/fakes. What would run in Triton is
our reference, since Triton's interpreter takes minutes for what a request needs; but with TRITON_TOO it is that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAKES = Path(__file__).parents[1] / "fakes"
SLOW = "Triton's interpreter is too slow."


class Announced(list[Any]):
    """In place of the list of aiter's calls: prints the name of each function once, and keeps no caller's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: set[str] = set()

    def append(self, call: Any) -> None:
        """See list."""
        if call.path not in self.paths:
            self.paths.add(call.path)
            print(f"called {call.path}", flush=True)  # noqa: T201


def simulate() -> None:
    """Do so in this process; once, before our adapters are imported."""
    sys.path.insert(0, str(FAKES))

    from aiter import _recorded

    from atom_core.kernels import OPS, mla_attention
    from atom_core.kernels.linear import tiles
    from atom_core.kernels.mla_attention.reference import ReferenceMlaAttention
    from atom_core.kernels.select import KernelSet, Target
    from atom_plugin.common import kernels

    build = kernels.kernel_set

    def kernel_set(
        target: Target,
        forced: Mapping[str, str] | None = None,
        contributed: Mapping[str, Any] | None = None,
        excluded: Mapping[tuple[str, str], str] | None = None,
        **others: Any,
    ) -> KernelSet:
        slow = {} if os.environ.get("TRITON_TOO") else {(op.name, "triton"): SLOW for op in OPS}
        return build(target, forced, contributed, {**slow, **(excluded or {})}, **others)

    # What aiter's implementations leave to Triton: few rows with a result in float32, and uneven batches of latents.
    tiles.MAX_ROWS = 0
    mla_attention._build_triton = lambda spec, target: ReferenceMlaAttention(spec)
    _recorded.CALLS = Announced()
    kernels.kernel_set = kernel_set
    Target.of = classmethod(lambda cls, device: cls("rocm", os.environ["GPU_ARCHS"]))
