"""Small types that configurations and kernels share. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Of gated networks; "clamped_swiglu" is GPT-OSS's, which configurations do not name.
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
#: Of the clamped SwiGLU: how steep its sigmoid is, and where it clamps.
SWIGLU_STEEPNESS, SWIGLU_LIMIT = 1.702, 7.0
Scoring = Literal["softmax", "sigmoid"]
#: What the score of a group of experts is: of its largest, or the sum of its two largest.
GroupScore = Literal["largest", "two largest"]


@dataclass(frozen=True)
class RoutingConfig:
    """How a router of a mixture of experts chooses; see :mod:`atom_core.kernels.moe_routing`."""

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalize: bool
    correction: bool = False
    """Whether the choice, and it alone, goes by scores that are corrected."""
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "two largest"
    shared: int = 0
    """Experts behind those that are chosen from, to which every token goes as well, each with a weight of 1."""

    @property
    def total_experts(self) -> int:
        """Experts that a token may go to, shared ones included."""
        return self.num_experts + self.shared

    @property
    def experts_per_token(self) -> int:
        """Experts that each token goes to, shared ones included."""
        return self.top_k + self.shared

    def __post_init__(self) -> None:
        assert self.num_experts % self.num_groups == 0
        assert 0 < self.top_groups <= self.num_groups
        assert 0 < self.top_k <= self.top_groups * (self.num_experts // self.num_groups)


SameStepReads = Literal["never", "at page starts", "anywhere"]
"""Where a request's new token stands that has another request's token of the very same step among its cached ones.

"never": there are no such requests. "at page starts": at the start of a page, as whole pages are shared.
"""

GraphSupport = Literal["none", "decodes", "always"]
"""Which batches may run inside a captured graph, without host syncs and at one launch shape for any lengths.

"decodes": those whose requests all bring equally few tokens.
"""
