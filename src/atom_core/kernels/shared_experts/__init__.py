"""How the experts that all tokens go through are run: among the routed ones, or as a network apart.

Checkpoints have ``s`` shared experts as one network, side by side: gate and up ``[s I, H]``, down ``[H, s I]``. Cut
into experts of the routed ones' size ``I``, they are experts ``E .. E + s - 1``, to which every token goes with a
weight of 1, and cost no launch of their own. The sum is the same; in FP8 with a scale for each token, what goes into
down has one for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from atom_core.kernels.select import Implementation, Op, Target, always


@dataclass(frozen=True)
class SharedExpertsSpec:
    """The shared experts of one layer beside its routed ones."""

    size: int
    """Of the middle of them all."""
    routed_size: int
    """Of the middle of a routed expert."""
    same_format: bool
    """Whether both are kept alike: in the model's dtype, or quantised by one scheme."""
    expert_parallel: bool
    """Whether ranks share out the routed experts, not each expert's middle."""


def _routed_supports(spec: SharedExpertsSpec, target: Target) -> str | None:
    if spec.expert_parallel:
        return "With expert parallelism each rank would need them all, and hold some of the routed ones."
    if spec.size % spec.routed_size:
        return f"Their middle, {spec.size}, does not divide into routed experts' of {spec.routed_size}."
    if not spec.same_format:
        return "The checkpoint keeps them in another format than the routed experts."
    return None


#: No kernels, but how many experts they are among the routed ones; "separate": none, they are a network apart. That
#: comes first on a CPU, where there are no launches to save.
SHARED_EXPERTS: Op[SharedExpertsSpec, int] = Op(
    "shared_experts",
    (
        Implementation("routed", _routed_supports, lambda spec, target: spec.size // spec.routed_size),
        Implementation("separate", always, lambda spec, target: 0),
    ),
)
