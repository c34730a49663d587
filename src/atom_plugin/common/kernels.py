"""The kernels that the settings ask for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Implementation, KernelSet, Target
from atom_plugin.common.settings import Settings


def forced_kernels(settings: Settings) -> Mapping[str, str]:
    """The kernels that ATOM_KERNELS and other settings force, by op.

    Raises:
        ValueError: they contradict each other.
    """
    forced = dict(settings.kernels)
    for variable, asked, op, implementation in _own_settings(settings):
        if asked and forced.setdefault(op, implementation) != implementation:
            raise ValueError(
                f"{variable}=1 asks for {op}={implementation}, and ATOM_KERNELS for {op}={forced[op]}: leave out one."
            )
    return forced


def chosen_kernels(
    target: Target,
    settings: Settings,
    contributed: Mapping[str, Implementation[Hashable, object]] | None = None,
    excluded: Mapping[tuple[str, str], str] | None = None,
) -> KernelSet:
    """The kernels of all ops for ``target``; see :func:`atom_core.kernels.kernel_set`."""
    forced = forced_kernels(settings)
    asked_by = {op: variable for variable, asked, op, _ in _own_settings(settings) if asked}
    return kernel_set(target, forced, contributed, excluded, with_aiter=settings.aiter, asked_by=asked_by)


def _own_settings(settings: Settings) -> tuple[tuple[str, bool, str, str], ...]:
    """For each setting that forces a kernel: its variable, whether it is on, the op and the implementation."""
    return (
        ("ATOM_SHUFFLED_CACHE", settings.shuffled_cache, "attention", "aiter_shuffled"),
        ("ATOM_AITER_QK_NORM_ROPE_CACHE", settings.aiter_qk_norm_rope_cache, "qk_norm_rope_cache", "aiter"),
    )
