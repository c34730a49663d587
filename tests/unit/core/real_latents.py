"""A trained DeepSeek checkpoint with the real models' latents and heads, which answers as it was trained to.

Kernels of vLLM and SGLang for a GPU are for these sizes alone. A latent is there several times over, side by side, so
that its norm sees the same mean of squares, and what reads it reads the first. Heads are filled up with zeros, and
rotated pairs lie where the larger head turns them alike. Queries are multiplied by what the larger head's scale lacks,
which alone is rounded anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.unit.core.fp8_checkpoints import save_beside
from tests.unit.core.wide_checkpoints import filled

#: Of V2, V3, R1 and Kimi K2.
SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _pairs_apart(rows: torch.Tensor, size: int) -> torch.Tensor:
    """``[.., rotated, columns]`` to ``[.., size, columns]``: pairs are where the larger head turns them as fast."""
    ratio = size // rows.shape[-2]
    pairs = rows.unflatten(-2, (-1, 2))
    apart = pairs.new_zeros(*pairs.shape[:-3], size // 2, 2, pairs.shape[-1])
    apart[..., ::ratio, :, :] = pairs
    return apart.flatten(-3, -2)


def with_real_latents(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write ``source``, in one file and with plain rope, to ``target``, a folder that is made; in another ``dtype``."""
    config = json.loads((source / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "default"
    heads = config["num_attention_heads"]
    rank, plain, rotated, value = (config[name] for name in SIZES)
    real_rank, real_plain, real_rotated, real_value = SIZES.values()
    factor = ((real_plain + real_rotated) / (plain + rotated)) ** 0.5
    copies = real_rank // rank
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        wide = tensor if dtype is None else tensor.to(dtype)
        if module in ("q_proj", "q_b_proj"):
            own = (factor * wide.double()).to(wide.dtype).unflatten(0, (heads, -1))
            parts = filled(own[:, :plain], 1, real_plain), _pairs_apart(own[:, plain:], real_rotated)
            wide = torch.cat(parts, 1).flatten(0, 1)
        elif module == "kv_a_proj_with_mqa":
            wide = torch.cat([*[wide[:rank]] * copies, _pairs_apart(wide[rank:], real_rotated)])
        elif module == "kv_a_layernorm":
            wide = wide.repeat(copies)
        elif module == "kv_b_proj":
            own = filled(wide, 1, real_rank).unflatten(0, (heads, -1))
            parts = filled(own[:, :plain], 1, real_plain), filled(own[:, plain:], 1, real_value)
            wide = torch.cat(parts, 1).flatten(0, 1)
        elif module == "o_proj":
            wide = filled(wide.unflatten(1, (heads, value)), 2, real_value).flatten(1, 2)
        tensors[name] = wide.contiguous()
    save_beside(source, target, tensors, None)
    sizes = {**SIZES, "head_dim": real_rotated, "qk_head_dim": real_plain + real_rotated}
    (target / "config.json").write_text(json.dumps({**config, **sizes}, indent=2) + "\n")
