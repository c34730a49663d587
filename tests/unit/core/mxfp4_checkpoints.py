"""GPT-OSS checkpoints with experts in MXFP4, made from unquantised ones, and the numbers that are left of these."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from atom_core.kernels.mxfp4_experts.reference import NUMBERS, dequantize

#: What the makers of GPT-OSS write.
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks ``[.., K / 32, 16]`` and scales ``[.., K / 32]`` of ``weight [.., K]``, each number the nearest."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp_min(2.0**-100).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(NUMBERS)).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def quantize(directory: Path, packed: Path, rounded: Path) -> None:
    """Save the checkpoint of ``directory`` twice: with packed experts, and with what they stand for."""
    (small, plain), config = ({}, {}), json.loads((directory / "config.json").read_text())
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            small[name] = plain[name] = tensor
            continue
        blocks, scales = pack(tensor.transpose(1, 2))
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = dequantize(blocks.flatten(2), scales, tensor.dtype).transpose(1, 2).contiguous()
    for folder, tensors, more in ((packed, small, {"quantization_config": CONFIG}), (rounded, plain, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
