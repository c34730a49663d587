"""Checkpoints in MXFP4, made from unquantised ones, and the numbers that are left of these: GPT-OSS's, AMD Quark's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from atom_core.kernels.mxfp4_linear.reference import NUMBERS, dequantize
from tests.unit.core.fp8_checkpoints import LINEARS, save_beside

#: How names of GPT-OSS's experts end.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
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
    """Blocks ``[.., K / 2]`` and scales ``[.., K / 32]`` of ``weight [.., K]``, each number the nearest."""
    groups = weight.float().unflatten(-1, (-1, 32))
    # Two less than the largest number's exponent, if that is rounded as e2m1 would: from 1.75 on to 2.
    exponents = (groups.abs().amax(-1) * 8 / 7).clamp_min(2.0**-100).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(NUMBERS)).abs().argmin(-1).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4).flatten(-2), (exponents + 127).to(torch.uint8)


def make_gpt_oss(source: Path, target: Path) -> None:
    """Write GPT-OSS's ``source`` with experts in MXFP4 to ``target``, a folder that is made."""
    tensors = load_file(source / "model.safetensors")
    for name in [it for it in tensors if it.endswith(EXPERTS)]:
        blocks, tensors[f"{name}_scales"] = pack(tensors.pop(name).transpose(1, 2))
        tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 32 // 2))
    save_beside(source, target, tensors, CONFIG)


def make_plain_gpt_oss(source: Path, target: Path) -> None:
    """Write GPT-OSS's ``source`` to ``target`` with the numbers that are left of its experts in MXFP4."""
    tensors = load_file(source / "model.safetensors")
    for name in [it for it in tensors if it.endswith(EXPERTS)]:
        blocks, scales = pack(tensors[name].transpose(1, 2))
        tensors[name] = dequantize(blocks, scales, tensors[name].dtype).transpose(1, 2).contiguous()
    save_beside(source, target, tensors, None)


def quark_mxfp4(rounded_inputs: bool = True, **more: Any) -> dict[str, Any]:
    """A ``quantization_config`` of AMD Quark's, with activations in MXFP4 too or left as they are."""
    number = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
        "observer_cls": "PerBlockMXObserver",
    }
    common = {
        "weight": {**number, "is_dynamic": False},
        "input_tensors": {**number, "is_dynamic": True} if rounded_inputs else None,
        "output_tensors": None,
        "bias": None,
    }
    return {
        "quant_method": "quark",
        "global_quant_config": common,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **more,
    }


def make_quark(
    source: Path,
    target: Path,
    config: dict[str, Any] | None = None,
    *,
    keep: Callable[[str], bool] = lambda module: False,
) -> None:
    """Write ``source`` with linear layers in MXFP4 to ``target``.

    Args:
        source: a checkpoint in one file.
        target: a folder that is made.
        config: its ``quantization_config``; None: :func:`quark_mxfp4`'s.
        keep: which modules stay as they are.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in LINEARS and not keep(module):
            tensors[name], tensors[f"{name}_scale"] = pack(tensor)
        else:
            tensors[name] = tensor
    save_beside(source, target, tensors, quark_mxfp4() if config is None else config)


def make_plain_quark(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the checkpoint ``source`` of :func:`make_quark` to ``target``, its packed weights in ``dtype``."""
    stored = load_file(source / "model.safetensors")
    plain = {
        name: dequantize(tensor, stored[f"{name}_scale"], dtype) if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("weight_scale")
    }
    save_beside(source, target, plain, None)
