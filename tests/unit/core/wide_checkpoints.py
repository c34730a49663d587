"""Trained checkpoints in sizes that kernels ask for, which answer as they were trained to, rounding for rounding.

The residual stream is there several times over, side by side: norms see the same mean of squares, what writes to it
writes each copy, and what reads it reads the first, its other columns being zero. Middles are filled up with zeros.
"""

from __future__ import annotations

import json
from math import lcm
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.unit.core.fp8_checkpoints import save_beside

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "lm_head")


def filled(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Zeros behind, up to ``size``."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, size - tensor.shape[dim]])


def widen(source: Path, target: Path, multiple: int) -> None:
    """Write ``source``, a checkpoint in one file of Qwen3's names, to ``target``, a folder that is made.

    Hidden sizes and middles, of layers and of experts, become multiples of ``multiple``.
    """
    config = json.loads((source / "config.json").read_text())
    hidden = lcm(config["hidden_size"], multiple)
    copies = hidden // config["hidden_size"]
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        wide = tensor
        if module in READERS:
            wide = filled(tensor, 1, hidden)
            if module in ("gate_proj", "up_proj"):
                wide = filled(wide, 0, -(-len(wide) // multiple) * multiple)
        elif module in ("o_proj", "down_proj"):
            wide = filled(torch.cat([tensor] * copies), 1, -(-tensor.shape[1] // multiple) * multiple)
        elif module not in ("q_norm", "k_norm"):  # norms of the stream, and the embedding
            wide = torch.cat([tensor] * copies, -1)
        tensors[name] = wide
    save_beside(source, target, tensors, None)
    middles = {key: config[key] for key in ("intermediate_size", "moe_intermediate_size") if key in config}
    sizes = {key: -(-size // multiple) * multiple for key, size in middles.items()}
    (target / "config.json").write_text(json.dumps({**config, **sizes, "hidden_size": hidden}, indent=2) + "\n")
