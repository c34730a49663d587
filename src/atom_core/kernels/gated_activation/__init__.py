"""The gated MLP's middle: ``act(gate) * up`` over ``x = [gate | up]``.

``x``: ``[T, 2N]``; result ``[T, N]``. ``act`` is SiLU, GELU (erf) or GELU (tanh); see arXiv 2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from atom_core.config import Activation
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.select import Implementation, Op, always


@dataclass(frozen=True)
class GatedActivationSpec:
    """One gated activation: the function, the width of its result, the dtype."""

    activation: Activation
    size: int
    dtype: torch.dtype


GatedActivationKernel = Callable[[torch.Tensor], torch.Tensor]

GATED_ACTIVATION: Op[GatedActivationSpec, GatedActivationKernel] = Op(
    "gated_activation",
    (Implementation("reference", always, lambda spec, target: partial(gated_activation, activation=spec.activation)),),
)
