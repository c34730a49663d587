"""What every Triton kernel asks first."""

from __future__ import annotations

import importlib.util

from atom_core.kernels.select import Target


def why_no_triton(target: Target) -> str | None:
    """None where Triton kernels can run on ``target``, else the reason."""
    if target.kind == "cpu":
        return "Triton kernels need a GPU."
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with PyTorch's GPU builds."
    return None
