"""The rope table that a model's attention layers share."""

from __future__ import annotations

import torch
from torch import nn

from atom_core.rope import RopeConfig, cos_sin_table
from atom_core.runtime import Runtime


class RotaryTable(nn.Module):
    """Float32 ``cos_sin [max_model_len, rotary_dim]``, a non-persistent buffer."""

    cos_sin: torch.Tensor

    def __init__(self, rope: RopeConfig, runtime: Runtime) -> None:
        super().__init__()
        table = cos_sin_table(rope, runtime.max_model_len, runtime.device)
        self.register_buffer("cos_sin", table, persistent=False)
