"""Checks of AMD's kernel library: whether it is installed, can be imported and has the functions that we call."""

from __future__ import annotations

from collections.abc import Iterable

from atom_core.kernels import aiter_library
from atom_core.kernels.select import Target
from atom_plugin.common.settings import Settings
from atom_plugin.doctor.finding import Finding

_TRITON = "or set ATOM_AITER=0 to run on Triton's kernels."


def check_aiter(target: Target, settings: Settings) -> Iterable[Finding]:
    """What prevents aiter from running on ``target``. aiter is imported only if it would be used."""
    if target.kind != "rocm" or not settings.aiter or target.arch not in aiter_library.ARCHITECTURES:
        return
    try:
        aiter_library.check_installed(target)
    except ValueError as error:
        problem, remedy = str(error).split(". ", 1)
        yield Finding(f"{problem}.", "A server that is asked for our models refuses to start.", remedy)
        return
    try:
        missing = aiter_library.missing()
    except Exception as error:  # noqa: BLE001 - another package's import may raise anything
        yield Finding(
            f"aiter is installed and cannot be imported: {type(error).__name__}: {error}.",
            "A server that is asked for our models refuses to start.",
            f"Repair or reinstall aiter (https://github.com/ROCm/aiter), {_TRITON}",
        )
        return
    for op, paths in missing.items():
        yield Finding(
            f"The installed aiter lacks {', '.join(paths)}, which {op} calls.",
            f"A model whose {op} would run on it refuses to start.",
            f"Install a version that has it, name another (ATOM_KERNELS={op}=triton), {_TRITON}",
        )


def rocm_line(target: Target) -> str | None:
    """The GPU's architecture and ROCm's version; None on other devices."""
    if target.kind != "rocm":
        return None
    import torch

    return f"GPU {target.arch}, ROCm {torch.version.hip or 'unknown'} (of this PyTorch)"
