"""AMD's kernel library aiter: who can use it, and how its functions are reached.

Importing aiter asks the device and may compile, so nothing is imported until a kernel of it is built. Each call stands
in an op of ours (:func:`atom_core.kernels.opaque.opaque`): aiter's own ops declare every tensor as written to.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from atom_core.kernels.select import Target

#: The GPUs whose limits the ``supports`` of our ``aiter_kernel`` modules state: MI300 and MI325, MI350 and MI355.
ARCHITECTURES = ("gfx942", "gfx950")

#: What aiter's own kernels multiply and cache as FP8.
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

_INSTALL = "Install it from https://github.com/ROCm/aiter; AMD's images of vLLM and SGLang have it."


def is_installed() -> bool:
    """Whether there is an aiter to import; it is not imported."""
    return importlib.util.find_spec("aiter") is not None


def why_no_aiter(target: Target) -> str | None:
    """None where aiter's kernels can run on ``target``, else the reason."""
    if target.kind != "rocm":
        return "aiter's kernels are for AMD's GPUs."
    if target.arch not in ARCHITECTURES:
        return f"aiter's kernels are used on {' and '.join(ARCHITECTURES)}, not on {target.arch}."
    if not is_installed():
        return f"aiter is not installed. {_INSTALL}"
    return None


def check_installed(target: Target) -> None:
    """Refuse to go on without aiter where it is expected.

    Raises:
        ValueError: ``target`` is a GPU that aiter's kernels are for, and it is not installed.
    """
    if target.kind == "rocm" and target.arch in ARCHITECTURES and not is_installed():
        raise ValueError(
            f"aiter, which our models use on {target.arch}, is not installed. {_INSTALL} "
            "Or set ATOM_AITER=0 to run on Triton's kernels."
        )


def aiter_function(path: str) -> Callable[..., Any]:
    """The function that users import as ``path``, "aiter.rms_norm".

    Raises:
        ValueError: the installed aiter has none of that name.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("aiter"):
            raise  # something that aiter itself needs
        raise ValueError(
            f"The installed aiter has no {path}, which a kernel that was chosen for this model calls. Install a "
            "version that has it (`atom-plugin doctor` lists what is missing), or set ATOM_AITER=0 to run on "
            "Triton's kernels."
        ) from None
    return found


def require(*paths: str) -> None:
    """Fail while a model is built, and not at its first request, where functions are missing.

    Raises:
        ValueError: the first that is.
    """
    for path in paths:
        aiter_function(path)
