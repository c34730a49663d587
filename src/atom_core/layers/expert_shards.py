"""Checkpoint tensors of single experts: three matrices each.

Checkpoints store shared experts as one network. Where they run as experts after the routed ones, each has its rows of
that network's gate and up, and its columns of down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atom_core.config import MoEConfig
from atom_core.kernels.shared_experts import SHARED_EXPERTS, SharedExpertsSpec
from atom_core.layers.linear_methods import Shard
from atom_core.layers.parameters import checkpoint_module
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from atom_core.layers.experts import Experts


def expert_shards(layer: Experts, expert: int) -> Iterator[tuple[str, Shard]]:
    """(our weight, shard) of each of an expert's matrices; shared experts come after the routed ones."""
    names, hidden, place = layer.names, layer.hidden_size, expert - layer.routed
    module, size, first, mine = f"{layer.folder}.{expert}", layer.intermediate_size, 0, layer.intermediate_range
    if place >= 0:
        module, size, first = layer.shared_module, size * (layer.total - layer.routed), size * place
    mine = range(first + mine.start, first + mine.stop)
    for name, begin in ((names.gate, 0), (names.up, len(mine))):
        yield "gate_up", Shard(f"{module}.{name}", size, hidden, mine, range(hidden), begin)
    yield "down", Shard(f"{module}.{names.down}", hidden, size, range(hidden), mine)


def shared_as_routed(config: MoEConfig, runtime: Runtime, name: str) -> int:
    """The number of shared experts of the mixture ``name`` that run as routed ones; 0: a separate network, or none.

    Raises:
        ValueError: matrices of one weight are quantised differently, or ``ATOM_KERNELS`` asks for an unsupported one.
    """
    if not (config.shared_size and runtime.fuse_modules):
        return 0
    names = config.names
    first = checkpoint_module(f"{name}.experts", f"../../{names.module}.experts.0")
    shared = f"{name}.{names.shared}"
    together = [(names.gate, names.up), (names.down,)]
    schemes = [
        runtime.quant.linear([f"{module}.{it}" for it in matrices])
        for module in (first, shared)
        for matrices in together
    ]
    same_format = not config.fused and not config.bias and all(scheme == schemes[0] for scheme in schemes)
    spec = SharedExpertsSpec(config.shared_size, config.intermediate_size, same_format, runtime.expert_parallel)
    return runtime.kernels.select(SHARED_EXPERTS, spec)
