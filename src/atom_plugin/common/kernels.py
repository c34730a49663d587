"""The kernels that a process's settings ask for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Implementation, KernelSet, Target
from atom_plugin.common.settings import Settings


def chosen_kernels(
    target: Target,
    settings: Settings,
    contributed: Mapping[str, Implementation[Hashable, object]] | None = None,
    excluded: Mapping[tuple[str, str], str] | None = None,
) -> KernelSet:
    """The kernels of all ops for ``target``; see :func:`atom_core.kernels.kernel_set`."""
    return kernel_set(target, settings.kernels, contributed, excluded, with_aiter=settings.aiter)
