"""How a server's command shares a model out over its ranks."""

from __future__ import annotations

from typing import NamedTuple

from atom_plugin.doctor.command import Command, tensor_parallel_size
from atom_plugin.doctor.framework import SGLANG
from atom_plugin.doctor.hybrid import ServerArguments, data_parallel_attention

#: vLLM's flags, with their short forms.
_EXPERT_PARALLEL, _DATA_PARALLEL = ("--enable-expert-parallel", "-ep"), ("--data-parallel-size", "-dp")


class Sharing(NamedTuple):
    """As :func:`atom_core.loading.check_files` takes it."""

    tensor_parallel_size: int = 1
    """Ranks that share heads."""
    expert_parallel: bool = False
    """Whether each rank has whole experts."""
    data_parallel_size: int = 1
    """Groups of such ranks, which share the experts of a mixture."""

    @classmethod
    def of(cls, command: Command) -> Sharing:
        """What a command asks for."""
        ranks = tensor_parallel_size(command)
        if command.framework is SGLANG:
            given = ServerArguments(command)
            groups = data_parallel_attention(given)
            # Other numbers are refused by a check of their own.
            shared = ranks // groups if groups and ranks % groups == 0 else ranks
            return cls(shared, (given.ep_size or 1) > 1, groups)
        flags = command.flags
        value = next((flags[it] for it in _DATA_PARALLEL if it in flags), "")
        whole = any(it in flags for it in _EXPERT_PARALLEL)
        return cls(ranks, whole, int(value) if value.isdecimal() and int(value) else 1)
