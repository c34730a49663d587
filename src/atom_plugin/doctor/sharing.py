"""How a server's command shares a model out over its ranks."""

from __future__ import annotations

from typing import NamedTuple

from atom_plugin.doctor.command import Command, data_parallel_size, tensor_parallel_size
from atom_plugin.doctor.framework import SGLANG
from atom_plugin.doctor.hybrid import ServerArguments, data_parallel_attention

#: vLLM's flag, and its short form.
_EXPERT_PARALLEL = ("--enable-expert-parallel", "-ep")


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
            # Numbers below 1, or that do not divide the ranks, are refused by a check of their own.
            groups = max(1, data_parallel_attention(given))
            shared = ranks // groups if ranks % groups == 0 else ranks
            return cls(shared, (given.ep_size or 1) > 1, groups)
        return cls(ranks, any(it in command.flags for it in _EXPERT_PARALLEL), data_parallel_size(command))
