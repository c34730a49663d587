"""FP8 (e4m3) weights with a scale per tensor, row or 128x128 block, and activations quantised to FP8.

Three kinds of checkpoints are read: ``quant_method`` "fp8" (AutoFP8, Hugging Face and DeepSeek), "compressed-tensors"
(llm-compressor; https://github.com/vllm-project/compressed-tensors) and "modelopt" (NVIDIA). The shape of a scale
tensor, not the configuration, tells one scale per weight from one per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from atom_core.quant.errors import unsupported
from atom_core.quant.scheme import LayerScheme, with_plain_head

InputScale = Literal["static", "dynamic"]

#: Rows and columns of a weight's block, and elements of a token's group, that share one scale.
BLOCK_SIZE = 128
_BLOCK = [BLOCK_SIZE, BLOCK_SIZE]


@dataclass(frozen=True, kw_only=True)
class Fp8Config(LayerScheme):
    """FP8 linear layers; the embedding and the head are not quantised."""

    serialized: bool
    """Whether the checkpoint's weights are FP8; else they are quantised while loading."""
    input_scale: InputScale = "dynamic"
    """"static": activations have the checkpoint's scale. "dynamic": each token has its own scale, also for checkpoints
    that ask for one dynamic scale per tensor: this is finer and needs no second pass.
    """
    block: bool = False
    """Whether each block of a weight and each group of :data:`BLOCK_SIZE` elements of a token has a scale, which needs
    serialized weights and dynamic activations. Else a weight has one scale or one per row, and a token has one.
    """
    scale: str = "weight_scale"
    """The checkpoint name of a weight's scales."""
    name: str = "fp8"


def online_fp8() -> Fp8Config:
    """Quantise an unquantised checkpoint: weights with one scale per row, activations with one per token."""
    return Fp8Config(serialized=False)


def read_fp8(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config:
    """A checkpoint of ``quant_method`` "fp8".

    Raises:
        ValueError: another block size, static activations with blocks, or an unknown activation scheme.
    """
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic"):
        raise unsupported("fp8", f"activation_scheme={scheme!r}")
    ignored = tuple(config.get("ignored_layers") or config.get("modules_to_not_convert") or ())
    block = config.get("weight_block_size")
    if not block:
        return Fp8Config(serialized=True, input_scale=scheme, ignored=ignored)
    if list(block) != _BLOCK:
        raise unsupported("fp8", f"weight_block_size={list(block)} (only {_BLOCK})")
    if scheme != "dynamic":
        raise unsupported("fp8", f"weight_block_size={_BLOCK} and activation_scheme={scheme!r} (only 'dynamic')")
    return Fp8Config(serialized=True, block=True, scale="weight_scale_inv", ignored=ignored)


def read_compressed_tensors(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config:
    """A checkpoint of ``quant_method`` "compressed-tensors" with FP8 weights and activations.

    Raises:
        ValueError: another format.
    """
    method = "compressed-tensors"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unsupported(method, f"sparsity format {sparsity!r}")
    if config.get("transform_config"):
        raise unsupported(method, "transforms (transform_config)")
    groups = list((config.get("config_groups") or {}).values())
    found = {_group_scheme(group) for group in groups}
    if len(found) != 1:
        raise unsupported(method, f"{len(found)} different schemes in config_groups")
    targets = tuple(dict.fromkeys(target for group in groups for target in group.get("targets") or ()))
    if not targets:
        raise unsupported(method, "config_groups without targets")
    scheme = replace(found.pop(), targets=targets, ignored=tuple(config.get("ignore") or ()))
    return with_plain_head(scheme, method, hf)


def _group_scheme(group: Mapping[str, Any]) -> Fp8Config:
    method = "compressed-tensors"
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    if kind[:2] != ("float", 8) or kind[2] not in ("tensor", "channel", "block"):
        raise unsupported(method, f"weights of type={kind[0]!r}, num_bits={kind[1]}, strategy={kind[2]!r}")
    if not weights.get("symmetric", True) or weights.get("dynamic"):
        raise unsupported(method, "weights that are not symmetric and static")
    if not inputs:
        raise unsupported(method, "weights alone quantised (no input_activations)")
    if not inputs.get("symmetric", True):
        raise unsupported(method, "input_activations that are not symmetric")
    block = kind[2] == "block"
    if block and _block_structure(weights) != _BLOCK:
        raise unsupported(method, f"block_structure={weights.get('block_structure')!r} (only {_BLOCK})")
    kind = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"))
    dynamic = inputs.get("dynamic", False)
    if block:
        allowed = kind[2] == "group" and inputs.get("group_size") == BLOCK_SIZE and dynamic is True
    else:
        allowed = kind[2] in (("token", "tensor") if dynamic else ("tensor",))
    if kind[:2] != ("float", 8) or not allowed or not isinstance(dynamic, bool):
        described = f"type={kind[0]!r}, num_bits={kind[1]}, strategy={kind[2]!r}, dynamic={dynamic}"
        if block:
            described += f", group_size={inputs.get('group_size')} with weights in blocks"
        raise unsupported(method, f"input_activations of {described}")
    return Fp8Config(serialized=True, input_scale="dynamic" if dynamic else "static", block=block)


def _block_structure(weights: Mapping[str, Any]) -> list[int] | None:
    """Rows and columns of a block, which older files write as "128x128"."""
    found = weights.get("block_structure")
    if isinstance(found, str):
        found = [int(part) if part.isdecimal() else part for part in found.split("x")]
    return None if found is None else list(found)


def read_modelopt(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config:
    """A checkpoint of ``quant_method`` "modelopt" and ``quant_algo`` "FP8": one scale per weight, static activations.

    Raises:
        ValueError: another algorithm.
    """
    inner = config.get("quantization") or config
    algorithm = inner.get("quant_algo")
    if algorithm != "FP8":
        raise unsupported("modelopt", f"quant_algo={algorithm!r}")
    ignored = inner.get("ignore") or inner.get("exclude_modules") or ()
    return with_plain_head(Fp8Config(serialized=True, input_scale="static", ignored=tuple(ignored)), "modelopt", hf)
