"""Checks and launch options that all Triton kernels share."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.select import Target


def why_no_triton(target: Target) -> str | None:
    """Why Triton kernels cannot run on ``target``, or None."""
    if target.kind == "cpu":
        return "Triton kernels need a GPU."
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with PyTorch's GPU builds."
    return None


def why_not_fused(separate: Iterable[tuple[str, str]], or_else: Iterable[tuple[str, str]] = ()) -> str | None:
    """Why a fused Triton kernel does not replace the selected implementations of its ops, or None.

    It replaces Triton's, as (op, implementation) in ``separate``, and those in ``or_else``.
    """
    for op, chosen in separate:
        if chosen != "triton" and (op, chosen) not in or_else:
            return f"It fuses Triton kernels, and {op} is {chosen} here."
    return None


def remark_on_few_rows(target: Target) -> str | None:
    """The remark that Triton's products of 2 to 64 rows are slow on ``target``, or None."""
    if not target.is_hopper:
        return None
    from atom_core.kernels.linear.tiles import why_no_gluon  # needs triton, which a CPU may lack

    reason = why_no_gluon()
    return None if reason is None else f"2 to 64 rows are multiplied by a slower kernel. {reason}"


def overlaps(target: Target) -> bool:
    """Whether a kernel may start while the kernel before it still runs (programmatic dependent launch, from sm90 on).

    The kernel waits before it touches what others have written. Its loads of weights before the wait cost no time.
    Small kernels let the next one start at once, kernels that fill the GPU when they end.
    """
    return target.kind == "cuda" and int(target.arch.removeprefix("sm")) >= 90


def takes_amd_assembly(nvidia: bool) -> bool:
    """Whether a kernel uses AMD's inline assembly; Triton's interpreter runs none."""
    import triton  # which a CPU may lack

    return not nvidia and not triton.knobs.runtime.interpret


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 1 for a CPU, where the interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_options(overlap: bool) -> dict[str, bool]:
    """The options of a launch that may overlap; other backends of Triton do not know them."""
    return {"launch_pdl": True} if overlap else {}


def why_no_triton_cache(dtype: torch.dtype, cache_dtype: torch.dtype, target: Target) -> str | None:
    """Why a Triton kernel of a model in ``dtype`` cannot use a cache of ``cache_dtype``, or None."""
    if cache_dtype == dtype:
        return None
    if cache_dtype not in FP8_DTYPES:
        return f"The Triton kernel has a cache in the model's dtype {dtype} or in FP8, not {cache_dtype}."
    if cache_dtype == torch.float8_e4m3fnuz and target.kind != "rocm":
        return f"Triton has {cache_dtype} on AMD alone."
    if cache_dtype == torch.float8_e4m3fn and target.kind == "cuda" and int(target.arch.removeprefix("sm")) < 89:
        return f"Triton has {cache_dtype} from sm89 on, not on {target.arch}."
    return None


def cdiv(x: int, y: int) -> int:
    """``x / y``, rounded up. Triton's own function of this name takes some microseconds on the host."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The lowest power of two that is no less than ``x``, from 1 on, and 0 for 0; quicker than Triton's own."""
    return 1 << (x - 1).bit_length() if x else 0
