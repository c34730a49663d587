"""What every Triton kernel asks first."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.select import Target


def why_no_triton(target: Target) -> str | None:
    """None where Triton kernels can run on ``target``, else the reason."""
    if target.kind == "cpu":
        return "Triton kernels need a GPU."
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with PyTorch's GPU builds."
    return None


def why_not_fused(separate: Iterable[tuple[str, str]], or_else: Iterable[tuple[str, str]] = ()) -> str | None:
    """None where each of the ops, which come with the implementations chosen for them, is Triton's, else the reason.

    ``or_else``: ops with implementations of others beside which the fused kernel is used as well.
    """
    for op, chosen in separate:
        if chosen != "triton" and (op, chosen) not in or_else:
            return f"It fuses Triton kernels, and {op} is {chosen} here."
    return None


def remark_on_few_rows(target: Target) -> str | None:
    """What a user should know of Triton's products on ``target``: whether those of several rows are the slower ones."""
    if (target.kind, target.arch) != ("cuda", "sm90"):
        return None
    from atom_core.kernels.linear.tiles import why_no_gluon  # needs triton, which a CPU may lack

    reason = why_no_gluon()
    return None if reason is None else f"2 to 64 rows are multiplied by a slower kernel. {reason}"


def overlaps(target: Target) -> bool:
    """Whether a kernel may start while the one before it still runs ("programmatic dependent launch", from sm90 on).

    A kernel that is launched so waits before it touches what others have written; what it does before, with weights
    alone, costs no time. Small kernels let the next one start at once, those that fill the GPU when they are done.
    """
    return target.kind == "cuda" and int(target.arch.removeprefix("sm")) >= 90


def takes_amd_assembly(nvidia: bool) -> bool:
    """Whether a kernel's instructions of AMD's own are compiled; Triton's interpreter runs no assembly."""
    import triton  # which a CPU may lack

    return not nvidia and not triton.knobs.runtime.interpret


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many of them a GPU has; 1 for a CPU, where the interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_options(overlap: bool) -> dict[str, bool]:
    """What a launch of such a kernel takes beside its arguments; other backends of Triton do not know the option."""
    return {"launch_pdl": True} if overlap else {}


def why_no_triton_cache(dtype: torch.dtype, cache_dtype: torch.dtype, target: Target) -> str | None:
    """None where a Triton kernel of a model in ``dtype`` can use a cache of ``cache_dtype``, else the reason."""
    if cache_dtype == dtype:
        return None
    if cache_dtype not in FP8_DTYPES:
        return f"The Triton kernel has a cache in the model's dtype {dtype} or in FP8, not {cache_dtype}."
    if cache_dtype == torch.float8_e4m3fnuz and target.kind != "rocm":
        return f"Triton has {cache_dtype} on AMD alone."
    if cache_dtype == torch.float8_e4m3fn and target.kind == "cuda" and int(target.arch.removeprefix("sm")) < 89:
        return f"Triton has {cache_dtype} from sm89 on, not on {target.arch}."
    return None
