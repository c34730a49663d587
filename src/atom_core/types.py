"""Small types that configurations and kernels share, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

#: Activations of gated MLPs; "clamped_swiglu" is GPT-OSS's, which its configuration does not name.
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
#: The clamped SwiGLU's sigmoid factor (alpha) and clamping limit.
SWIGLU_STEEPNESS, SWIGLU_LIMIT = 1.702, 7.0
Scoring = Literal["softmax", "sigmoid"]
#: The score of a group of experts: its largest score, or the sum of its two largest.
GroupScore = Literal["largest", "two largest"]


@dataclass(frozen=True)
class RoutingConfig:
    """How a router chooses experts; see :mod:`atom_core.kernels.moe_routing`."""

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalize: bool
    correction: bool = False
    """Whether a correction bias is added to the scores for the choice, but not for the weights."""
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "two largest"
    shared: int = 0
    """Shared experts after the routed ones; every token goes to each of them."""
    shared_gate: bool = False
    """Whether the router has one more logit, after the experts': its sigmoid is the weight of shared experts, not 1."""

    #: With a gate, the logits of a token are padded to a multiple of this, so that kernels load them in vectors.
    ALIGNMENT: ClassVar[int] = 16

    @property
    def total_experts(self) -> int:
        """Routed and shared experts."""
        return self.num_experts + self.shared

    @property
    def num_logits(self) -> int:
        """Logits of a token: the routed experts', and with a gate that of the shared ones, and unused ones."""
        if not self.shared_gate:
            return self.num_experts
        return (self.num_experts // self.ALIGNMENT + 1) * self.ALIGNMENT

    @property
    def experts_per_token(self) -> int:
        """Experts that each token goes to, including shared ones."""
        return self.top_k + self.shared

    def __post_init__(self) -> None:
        assert self.num_experts % self.num_groups == 0
        assert 0 < self.top_groups <= self.num_groups
        assert 0 < self.top_k <= self.top_groups * (self.num_experts // self.num_groups)


SameStepReads = Literal["never", "at page starts", "anywhere"]
"""Where the first token of a request may be whose cached prefix has another request's tokens of the same step.

"never": there are no such requests. "at page starts": at the start of a page, as only full pages are shared.
"""

GraphSupport = Literal["none", "decodes", "always"]
"""Which batches can run in a captured graph: no host syncs, and one launch shape for all lengths.

"decodes": batches in which every request has the same few new tokens.
"""
