"""FP8 checkpoints made from others, as the tools that people use write them, and what they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
#: The linear layers of a decoder layer, which FP8 checkpoints quantise; then Mixtral's experts and DeepSeek's
#: projections, and those of linear attention.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEARS += ("w1", "w2", "w3", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "eh_proj")
LINEARS += ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")
#: What DeepSeek's own FP8 checkpoints leave as it is, and do not say so.
SILENTLY_PLAIN = "eh_proj"
BLOCK = 128


def scheme(strategy: str, dynamic: bool, inputs: str | None = None) -> dict[str, Any]:
    """A group of llm-compressor's."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = inputs or ("token" if dynamic else "tensor")
    of_weights, of_inputs = {}, {}
    if strategy == "block":
        inputs, of_weights, of_inputs = "group", {"block_structure": [BLOCK, BLOCK]}, {"group_size": BLOCK}
    return {
        "targets": ["Linear"],
        "weights": {**number, "strategy": strategy, "dynamic": False, **of_weights},
        "input_activations": {**number, "strategy": inputs, "dynamic": dynamic, **of_inputs},
    }


def compressed(strategy: str, dynamic: bool, **more: Any) -> dict[str, Any]:
    """A ``quantization_config`` of llm-compressor's."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": scheme(strategy, dynamic)},
        "ignore": ["lm_head"],
        **more,
    }


def quark(weight: str, inputs: str, dynamic: bool) -> dict[str, Any]:
    """A ``quantization_config`` of AMD Quark's, with a cache in FP8."""
    number = {"dtype": "fp8_e4m3", "symmetric": True, "ch_axis": 0, "group_size": None, "observer_cls": "x"}
    of_weights = {**number, "qscheme": weight, "is_dynamic": False}
    of_inputs = {**number, "qscheme": inputs, "is_dynamic": dynamic}
    if weight == "per_block":
        of_weights["block_size"], of_inputs["group_size"] = [BLOCK, BLOCK], BLOCK
    common = {"weight": of_weights, "input_tensors": of_inputs, "output_tensors": None, "bias": None}
    cached = {**common, "output_tensors": {**number, "qscheme": "per_tensor", "is_dynamic": False}}
    return {
        "quant_method": "quark",
        "global_quant_config": common,
        "layer_quant_config": {"*k_proj": cached, "*v_proj": cached},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
    }


@dataclass(frozen=True)
class Format:
    """One tool's way to write an FP8 checkpoint."""

    name: str
    config: Mapping[str, Any] = field(hash=False)
    per_row: bool = False
    static: bool = False
    scale_shape: tuple[int, ...] = ()
    """Of a tensor's one scale; of one a row, where that is not [rows, 1]."""
    block: bool = False
    scale: str = "weight_scale"

    def __str__(self) -> str:
        return self.name


FORMATS = (
    Format("fp8, dynamic", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    Format("fp8, static", {"quant_method": "fp8", "activation_scheme": "static"}, static=True, scale_shape=(1,)),
    Format("fp8, a scale a row", {"quant_method": "fp8", "activation_scheme": "dynamic"}, per_row=True),
    Format("compressed, tensor, dynamic", compressed("tensor", dynamic=True), scale_shape=(1,)),
    Format("compressed, tensor, static", compressed("tensor", dynamic=False), static=True, scale_shape=(1,)),
    Format("compressed, channel, dynamic", compressed("channel", dynamic=True), per_row=True),
    Format("modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, static=True),
    Format("quark, tensor, static", quark("per_tensor", "per_tensor", dynamic=False), static=True),
    Format(
        "quark, channel, dynamic", quark("per_channel", "per_channel", dynamic=True), per_row=True, scale_shape=(-1,)
    ),
)

#: The same with a scale for each block of a weight.
BLOCK_FORMATS = (
    Format(
        "fp8, blocks",
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        block=True,
        scale="weight_scale_inv",
    ),
    Format("compressed, blocks", compressed("block", dynamic=True), block=True),
    Format("quark, blocks", quark("per_block", "per_group", dynamic=True), block=True),
)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in FP8 and the scales of its blocks of 128 by 128."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448.0
    return (weight.float() / widen(scale, weight.shape)).clamp(-448.0, 448.0).to(E4M3), scale


def widen(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scales of blocks, for each number of a weight of ``shape``."""
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def quantize(weight: torch.Tensor, per_row: bool, scale_shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in FP8 and its scale, as a tool stores them."""
    wide = weight.float()
    largest = wide.abs().amax(-1, keepdim=True) if per_row else wide.abs().max()
    scale = largest / 448.0
    quantized = (wide / scale).clamp(-448.0, 448.0).to(E4M3)
    return quantized, scale if per_row and not scale_shape else scale.reshape(scale_shape)


def save_beside(
    source: Path, target: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any] | None
) -> None:
    """Write ``source`` with other tensors and another ``quantization_config`` to ``target``, a folder that is made."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    path = target / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "quantization_config"}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    path.write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(tensors), target / "model.safetensors", {"format": "pt"})


def make_fp8(
    source: Path,
    target: Path,
    form: Format,
    *,
    keep: Callable[[str], bool] = lambda module: False,
    input_scale: Callable[[str], float] = lambda module: 0.05,
) -> None:
    """Write ``source`` quantised to ``target``.

    Args:
        source: a checkpoint in one file.
        target: a folder that is made.
        form: how.
        keep: which modules stay as they are.
        input_scale: of a module, where the format has such scales.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        kind = module.rpartition(".")[2]
        kept = keep(module) or (kind == SILENTLY_PLAIN and form.scale == "weight_scale_inv")
        if name.endswith(".weight") and kind in LINEARS and not kept:
            found = quantize_blocks(tensor) if form.block else quantize(tensor, form.per_row, form.scale_shape)
            tensors[name], tensors[f"{module}.{form.scale}"] = found
            if form.static:
                tensors[f"{module}.input_scale"] = torch.full(form.scale_shape, input_scale(module))
        else:
            tensors[name] = tensor
    save_beside(source, target, tensors, form.config)


def make_plain(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the FP8 checkpoint ``source`` to ``target`` in ``dtype``: its weights times their scales."""
    stored = load_file(source / "model.safetensors")
    plain = {}
    for name, tensor in stored.items():
        if tensor.dtype == E4M3:
            scale = stored[f"{name}_scale" if f"{name}_scale" in stored else f"{name}_scale_inv"]
            if scale.dim() == 2 and scale.shape != (len(tensor), 1):
                scale = widen(scale, tensor.shape)
            if scale.shape == tensor.shape[:1]:
                scale = scale[:, None]
            tensor = (tensor.float() * scale).to(dtype)
        if not name.endswith(("_scale", "_scale_inv")):
            plain[name] = tensor
    save_beside(source, target, plain, None)
