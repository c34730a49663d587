"""How shared experts run: as routed experts, or as a separate network.

Checkpoints store ``s`` shared experts as one network: gate and up ``[s I, H]``, down ``[H, s I]``. Split into experts
of the routed ones' intermediate size ``I``, they are experts ``E .. E + s - 1``, to which every token is routed with a
weight of 1, and they need no launch of their own. The sum is the same. In FP8 with a scale per token, the down input
has a scale per expert instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from atom_core.kernels.select import Implementation, Op, Target, always


@dataclass(frozen=True)
class SharedExpertsSpec:
    """The shared experts of one layer, and its routed ones."""

    size: int
    """Intermediate size of all shared experts together."""
    routed_size: int
    """Intermediate size of a routed expert."""
    same_format: bool
    """Whether both have the same dtype and quantisation scheme."""
    expert_parallel: bool
    """Whether ranks share out the routed experts, rather than each expert's intermediate size."""


def _routed_supports(spec: SharedExpertsSpec, target: Target) -> str | None:
    if spec.expert_parallel:
        return "With expert parallelism each rank would need all of them, but only some of the routed experts."
    if spec.size % spec.routed_size:
        return f"Their intermediate size {spec.size} is no multiple of the routed experts' {spec.routed_size}."
    if not spec.same_format:
        return "The checkpoint keeps them in another format than the routed experts."
    return None


#: Not a kernel but the number of shared experts that run as routed ones; "separate": none. It comes first on a CPU,
#: which has no launches to save.
SHARED_EXPERTS: Op[SharedExpertsSpec, int] = Op(
    "shared_experts",
    (
        Implementation("routed", _routed_supports, lambda spec, target: spec.size // spec.routed_size),
        Implementation("separate", always, lambda spec, target: 0),
    ),
)
