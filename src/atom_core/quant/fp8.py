"""FP8 (e4m3) weights with a scale for each tensor, row or block, and activations that are quantised too.

Checkpoints of three makers are read: ``quant_method`` "fp8" (AutoFP8, Hugging Face and DeepSeek), "compressed-tensors"
(llm-compressor; https://github.com/vllm-project/compressed-tensors) and "modelopt" (NVIDIA). A scale is never read from
here: whether a weight has one or one a row is what the checkpoint's tensor says. Blocks are 128 by 128, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from atom_core.quant.errors import unsupported
from atom_core.quant.scheme import LayerScheme, with_plain_head

InputScale = Literal["static", "dynamic"]

#: Rows and columns of a block of a weight that has one scale, and numbers of a token that share one then.
BLOCK_SIZE = 128
_BLOCK = [BLOCK_SIZE, BLOCK_SIZE]


@dataclass(frozen=True, kw_only=True)
class Fp8Config(LayerScheme):
    """How the linear layers of a model are quantised; the embedding and the head are not."""

    serialized: bool
    """The checkpoint's weights are FP8; else they are quantised while they are loaded."""
    input_scale: InputScale = "dynamic"
    """Activations have the checkpoint's scale, or each token gets one of its own.

    Checkpoints that ask for one dynamic scale for all tokens get one a token too, which is finer and needs no second
    pass over them.
    """
    block: bool = False
    """Each block of :data:`BLOCK_SIZE` rows and columns of a weight has a scale, and so has each :data:`BLOCK_SIZE`
    numbers of a token; else a weight has one or one a row, and a token one. Only where it is serialized and dynamic.
    """
    scale: str = "weight_scale"
    """What checkpoints call the tensor of a weight's scales."""
    name: str = "fp8"


def online_fp8() -> Fp8Config:
    """FP8 of a checkpoint that is not: a scale a row for weights, one a token for activations."""
    return Fp8Config(serialized=False)


def read_fp8(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config:
    """A checkpoint of ``quant_method`` "fp8".

    Raises:
        ValueError: its blocks are of another size or its activations static with blocks, or its activation scheme is
            unknown.
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
    """A checkpoint of ``quant_method`` "compressed-tensors", where it is FP8 for weights and activations.

    Raises:
        ValueError: it is anything else.
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
    """Rows and columns of a block; older files have "128x128"."""
    found = weights.get("block_structure")
    if isinstance(found, str):
        found = [int(part) if part.isdecimal() else part for part in found.split("x")]
    return None if found is None else list(found)


def read_modelopt(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Fp8Config:
    """A checkpoint of ``quant_method`` "modelopt" and ``quant_algo`` "FP8": one scale a weight, static activations.

    Raises:
        ValueError: another algorithm.
    """
    inner = config.get("quantization") or config
    algorithm = inner.get("quant_algo")
    if algorithm != "FP8":
        raise unsupported("modelopt", f"quant_algo={algorithm!r}")
    ignored = inner.get("ignore") or inner.get("exclude_modules") or ()
    return with_plain_head(Fp8Config(serialized=True, input_scale="static", ignored=tuple(ignored)), "modelopt", hf)
