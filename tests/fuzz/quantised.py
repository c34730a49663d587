"""Quantised checkpoints to change, what is changed in them, and the numbers that changed files stand for.

What a checkpoint stands for is worked out here from the formats' own descriptions, and of our reader nothing is used:
fp8 (DeepSeek's and Hugging Face's), compressed-tensors, modelopt, AMD Quark's, and MXFP4 of GPT-OSS and of Quark.
"""

from __future__ import annotations

import fnmatch
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fuzz.mutants import POOL, Mutant
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, E4M3, FORMATS, LINEARS, make_fp8
from tests.unit.core.hugging_face import FAMILIES, Family, make_config, make_model
from tests.unit.core.models import test_deepseek, test_fp8_experts, test_gpt_oss
from tests.unit.core.mxfp4_checkpoints import make_gpt_oss, make_quark, quark_mxfp4

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Magnitudes of e2m1 by their codes, of which the highest bit is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
_SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale")


class Meaningless(Exception):
    """The files stand for no numbers: to serve them would be wrong, whatever came of it."""


# --- checkpoints ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A family in a format, in sizes that the format can have."""

    family: Family
    form: str
    sizes: Mapping[str, Any] = field(default_factory=dict)


_FORMS = {form.name: form for form in (*FORMATS, *BLOCK_FORMATS)}
_BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128}
_LATENT_BLOCKS = {
    **_BLOCKS,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "moe_intermediate_size"), 128),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 64),
}
_MXFP4 = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32}
SOURCES = (
    Source(FAMILIES[3], "fp8, dynamic"),
    Source(FAMILIES[0], "compressed, channel, dynamic"),
    Source(FAMILIES[3], "fp8, blocks", _BLOCKS),
    Source(test_gpt_oss.FAMILY, "mxfp4", {"hidden_size": 64, "intermediate_size": 32}),
    Source(test_deepseek.V3, "fp8, blocks", _LATENT_BLOCKS),
    Source(FAMILIES[2], "compressed, tensor, static"),
    Source(test_fp8_experts.QWEN3, "fp8, blocks", {**_BLOCKS, "moe_intermediate_size": 128}),
    Source(FAMILIES[1], "modelopt"),
    Source(test_fp8_experts.MIXTRAL, "compressed, channel, dynamic", {"intermediate_size": 96}),
    Source(FAMILIES[3], "quark, channel, dynamic"),
    Source(FAMILIES[3], "compressed, blocks", _BLOCKS),
    Source(FAMILIES[3], "mxfp4 of quark", _MXFP4),
    Source(FAMILIES[2], "fp8, static"),
)


def make(source: Source, folder: Path) -> Path:
    """The checkpoint of a source under `folder`."""
    place = folder / f"{source.family}, {source.form}".replace(", ", "-").replace(" ", "-")
    plain = place.with_name(f"{place.name}-plain")
    make_model(plain, make_config(source.family, max_position_embeddings=256, **source.sizes))
    if source.form == "mxfp4":
        make_gpt_oss(plain, place)
    elif source.form == "mxfp4 of quark":
        make_quark(plain, place, quark_mxfp4(rounded_inputs=False))
    else:
        make_fp8(plain, place, _FORMS[source.form])
    return place


# --- changes -------------------------------------------------------------------------------------------------------

_QUANT_KEYS = (
    "activation_scheme bits desc_act exclude_modules fmt group_size ignore ignored_layers is_checkpoint_fp8_serialized "
    "kv_cache_scheme lm_head modules_to_convert modules_to_not_convert num_bits quant_algo scale_fmt sparsity_config "
    "strategy sym tool_note transform_config version weight_block_size zero_point"
).split()
_METHODS = "fp8 compressed-tensors modelopt mxfp4 quark gptq awq fbgemm_fp8 bitsandbytes torchao fp16".split()
_WORDS = (
    "dynamic static tensor channel token group block float int fp8_e4m3 fp8_e5m2 fp4 per_tensor per_channel per_group "
    "per_block Linear lm_head"
).split()
#: How a refusal names what a list of modules, or a scheme, does to weights that are stored otherwise.
_OF_MODULES = ("leaves out", "quantisation of it", "config.json says", "quantises", "Quantisation", "missing (")


def mutate_quantised(folder: Path, rng: random.Random) -> Mutant:
    """Change one thing of the quantised checkpoint in `folder` that a plain one does not have."""
    kinds: tuple[tuple[float, Callable[[Path, random.Random], Mutant]], ...] = (
        (0.30, _value),
        (0.06, _added),
        (0.05, _method),
        (0.11, _modules),
        (0.28, _scale),
        (0.15, _weight),
        (0.05, _extra),
    )
    change = rng.choices([it for _, it in kinds], [share for share, _ in kinds])[0]
    return change(folder, rng)


def _read(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in nested objects, lists left whole."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _paths(inner, (*path, key))
    return found


def _value(folder: Path, rng: random.Random) -> Mutant:
    """A key anywhere in the quantization_config removed, or with another value."""
    values = _read(folder)
    config = values["quantization_config"]
    *outer, key = path = rng.choice(_paths(config))
    place = config
    for step in outer:
        place = place[step]
    old = place[key]
    if rng.random() < 0.2:
        del place[key]
        shown = "(removed)"
    else:
        place[key] = rng.choice((*POOL, *_WORDS, [64, 64], [128, 128], [[128]], "128x128"))
        if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.5:
            place[key] = rng.choice((old * 2, old // 2, old + 1, float(old), str(old), [old]))
        elif isinstance(old, bool):
            place[key] = rng.choice((not old, None, str(old).lower(), int(old), "local"))
        shown = repr(place[key])
    _write(folder, values)
    return Mutant("quantization value", f"{'.'.join(map(str, path))}={shown}", (*map(str, path), *_OF_MODULES))


def _added(folder: Path, rng: random.Random) -> Mutant:
    values = _read(folder)
    config = values["quantization_config"]
    key = rng.choice([it for it in _QUANT_KEYS if it not in config])
    config[key] = rng.choice((*POOL, *_WORDS, [128, 128], ["lm_head"]))
    _write(folder, values)
    return Mutant("quantization key", f"{key}={config[key]!r}", (key, *_OF_MODULES))


def _method(folder: Path, rng: random.Random) -> Mutant:
    values = _read(folder)
    what = rng.choice(("other", "other", "null", "no object", "old name", "removed"))
    config = values.pop("quantization_config")
    if what == "other":
        config["quant_method"] = rng.choice(_METHODS)
    if what == "no object":
        config = rng.choice(("fp8", [config], 8, True))
    if what == "null":
        config = None
    if what != "removed":
        values["compression_config" if what == "old name" else "quantization_config"] = config
    _write(folder, values)
    shown = config.get("quant_method") if isinstance(config, dict) else config
    names = ("quantization_config", "quant_method", *_OF_MODULES)
    return Mutant("quantization method", f"{what}: {shown}", names)


def _modules(folder: Path, rng: random.Random) -> Mutant:
    """The lists that say which modules are quantised."""
    values = _read(folder)
    config = values["quantization_config"]
    module = rng.choice([it.removesuffix(".weight") for it in _tensors(folder) if _is_linear(it)] or ["lm_head"])
    parent = module.rpartition(".")[0]
    pattern = rng.choice(
        (module, parent, module.rpartition(".")[2], f"re:.*{parent.rpartition('.')[2]}.*", f"*{module[-9:]}", "Linear")
    )
    key = {"compressed-tensors": "ignore", "fp8": "modules_to_not_convert", "quark": "exclude", "modelopt": "ignore"}
    name = key.get(config["quant_method"], "modules_to_not_convert")
    if "config_groups" in config and rng.random() < 0.5:
        (group,) = config["config_groups"].values()
        group["targets"] = rng.choice(([pattern], ["Linear", pattern], [], ["re:.*proj.*"], "Linear", ["Linears"]))
        shown, name = repr(group["targets"]), "targets"
    else:
        config[name] = rng.choice(([*config.get(name, ()), pattern], [pattern], [], pattern, None))
        shown = repr(config[name])
    _write(folder, values)
    return Mutant("quantization modules", f"{name}={shown}", (name, *_OF_MODULES))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEARS


def _save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({it: tensor.contiguous() for it, tensor in tensors.items()}, folder / "model.safetensors")


def _scale(folder: Path, rng: random.Random) -> Mutant:
    tensors = _tensors(folder)
    name = rng.choice([it for it in tensors if it.endswith(("_scale", "_scale_inv", "_scales"))])
    old = tensors.pop(name)
    packed = old.dtype == torch.uint8
    changes: dict[str, Callable[[], torch.Tensor | None]] = {
        "removed": lambda: None,
        "one more": lambda: torch.cat([old.reshape(-1), old.reshape(-1)[:1]]),
        "flat": lambda: old.reshape(-1),
        "one axis more": lambda: old.unsqueeze(0),
        "a column": lambda: old.reshape(-1, 1),
        "a row": lambda: old.reshape(1, -1),
        "alone": old.reshape(-1)[0].clone,
        "none": lambda: old.reshape(-1)[:0],
        "in float64": old.double,
        "in bfloat16": old.bfloat16,
        "of integers": lambda: old.to(torch.int32),
        "in FP8": lambda: old.to(E4M3),
    }
    if packed:
        changes |= {
            "of 255": lambda: _with(old, 255, rng),
            "of 254": lambda: _with(old, 254, rng),
            "of 0": lambda: _with(old, 0, rng),
            "twice": lambda: old + 1,
        }
    else:
        changes |= {
            "of NaN": lambda: _with(old, float("nan"), rng),
            "of infinity": lambda: _with(old, float("inf"), rng),
            "negative": lambda: _with(old, -0.01, rng),
            "of 0": lambda: _with(old, 0.0, rng),
            "twice": lambda: old * 2,
        }
    what = rng.choice(sorted(changes))
    if (changed := changes[what]()) is not None:
        tensors[name] = changed
    elif rng.random() < 0.5:
        what = "renamed"
        renamed = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
        tensors[renamed] = old
    _save(folder, tensors)
    return Mutant(f"scale {what}", f"{name} {list(old.shape)}", (name,))


def _with(tensor: torch.Tensor, number: float, rng: random.Random) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[rng.randrange(changed.numel())] = number
    return changed


def _weight(folder: Path, rng: random.Random) -> Mutant:
    tensors = _tensors(folder)
    name = rng.choice([it for it, tensor in tensors.items() if tensor.dtype == E4M3 or it.endswith("_blocks")] or [""])
    if not name:
        name = rng.choice([it for it, tensor in tensors.items() if tensor.dtype == torch.uint8])
    old = tensors.pop(name)
    bits = old.view(torch.uint8)
    changes: dict[str, Callable[[], torch.Tensor | None]] = {
        "removed": lambda: None,
        "of other bits": lambda: (bits ^ 1).view(old.dtype),
        "as bytes": lambda: bits,
        "in int8": lambda: old.view(torch.int8),
        "in e5m2": lambda: old.view(torch.float8_e5m2),
        "in e4m3": lambda: old.view(E4M3),
        "in float32": old.float,
        "in bfloat16": lambda: old.to(torch.bfloat16),
        "transposed": lambda: old.transpose(0, 1) if old.dim() > 1 else old,
        "one row less": lambda: old[:-1],
        "one row more": lambda: torch.cat([bits, bits[:1]]).view(old.dtype),
        "of NaN": lambda: _with(bits, 127, rng).view(old.dtype),
    }
    what = rng.choice(sorted(changes))
    if (changed := changes[what]()) is not None:
        tensors[name] = changed
    _save(folder, tensors)
    return Mutant(f"weight {what}", name, (name,))


def _extra(folder: Path, rng: random.Random) -> Mutant:
    tensors = _tensors(folder)
    module = rng.choice([it.removesuffix(".weight") for it in tensors if _is_linear(it)])
    attention = f"{module.split('.self_attn')[0].split('.mlp')[0].split('.block_sparse')[0]}.self_attn"
    name = rng.choice((f"{module}.input_scale", f"{module}.weight_scale", f"{module}.weight_zero_point"))
    if rng.random() < 0.4:
        name = f"{attention}.{rng.choice(('k_scale', 'v_scale', 'kv_scale'))}"
    number = rng.choice((0.05, -1.0, float("nan"), 0.0))
    tensors[name] = torch.full(rng.choice(((), (1,), (2,))), number)
    _save(folder, tensors)
    return Mutant("extra scale", f"{name} of {number}", (name, name.rpartition(".")[2]))


# --- what changed files stand for ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meaning:
    """What a quantization_config says."""

    scale: str
    """Of a weight: what its tensor is called."""
    is_quantised: Callable[[str], bool]
    block: tuple[int, int] | None = None
    static: bool = False
    packed: bool = False
    experts_alone: bool = False


def is_quantised(folder: Path) -> bool:
    """Whether the checkpoint says that it is, or looks as if it were."""
    values = _read(folder)
    return bool(values.get("quantization_config") or values.get("compression_config")) or any(
        path.suffix == ".safetensors" and _looks_quantised(path) for path in folder.iterdir()
    )


def _looks_quantised(path: Path) -> bool:
    try:
        return any(tensor.dtype in (E4M3, torch.uint8) for tensor in load_file(path).values())
    except Exception:  # noqa: BLE001 - a damaged file looks like nothing
        return False


def dequantise(folder: Path, target: Path) -> None:
    """Write the checkpoint of the numbers that the one in `folder` stands for to `target`.

    Raises:
        Meaningless: it stands for none.
    """
    values = _read(folder)
    config = values.pop("quantization_config", None) or values.pop("compression_config", None)
    meaning = _meaning(config, values) if config else Meaning("weight_scale", lambda module: False)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    _write(target, values)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for path in folder.glob("*.safetensors"):
        try:
            files[path.name] = load_file(path)
        except Exception:  # noqa: BLE001 - Transformers will say it
            (target / path.name).write_bytes(path.read_bytes())
    # A weight's scale may be in another file.
    everywhere = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    for file, tensors in files.items():
        save_file(_plain(tensors, everywhere | tensors, meaning), target / file, {"format": "pt"})


def _plain(
    held: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], meaning: Meaning
) -> dict[str, torch.Tensor]:
    """The tensors of one file, whose scales may be elsewhere."""
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        module, _, last = name.rpartition(".")
        if last in _SCALES:
            continue
        if meaning.experts_alone and last.endswith(("_blocks", "_scales")):
            if last.endswith("_blocks"):
                wide = _experts(tensor, _tensor(tensors, f"{name.removesuffix('_blocks')}_scales"))
                plain[name.removesuffix("_blocks")] = wide
            continue
        if meaning.experts_alone or not _is_linear(name) or not meaning.is_quantised(module):
            if tensor.dtype not in _FLOATS:
                raise Meaningless(f"{name} is stored as {tensor.dtype}, and is not quantised")
            plain[name] = tensor
            continue
        scale = _tensor(tensors, f"{module}.{meaning.scale}")
        if meaning.packed:
            plain[name] = _unpacked(tensor, scale)
            continue
        if tensor.dtype != E4M3:
            raise Meaningless(f"{name} is stored as {tensor.dtype}, and should be FP8")
        _check_scale(scale, f"{module}.{meaning.scale}")
        if meaning.static:
            number = _tensor(tensors, f"{module}.input_scale")
            _check_scale(number, f"{module}.input_scale")
            if number.numel() != 1 or not bool(number > 0):
                raise Meaningless(f"{module}.input_scale is {number.tolist()}")
        plain[name] = tensor.float() * _wide(scale.float(), tensor, meaning.block)
    return plain


def _tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise Meaningless(f"there is no {name}")
    return tensors[name]


def _check_scale(scale: torch.Tensor, name: str) -> None:
    if scale.dtype not in _FLOATS:
        raise Meaningless(f"{name} is stored as {scale.dtype}")
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise Meaningless(f"{name} holds no scale")


def _wide(scale: torch.Tensor, weight: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    if weight.dim() != 2:
        raise Meaningless(f"a weight is {list(weight.shape)}")
    rows, columns = weight.shape
    if block is not None:
        if scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
            raise Meaningless(f"scales of blocks are {list(scale.shape)} for {list(weight.shape)}")
        return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape not in ((rows,), (rows, 1)):
        raise Meaningless(f"scales are {list(scale.shape)} for {list(weight.shape)}")
    return scale.reshape(rows, 1)


def _unpacked(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[.., K / 2]`` and ``[.., K / 32]`` bytes to ``[.., K]``: of a byte the lower half comes first."""
    if packed.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise Meaningless(f"MXFP4 is stored as {packed.dtype} with scales in {scales.dtype}")
    if packed.shape[:-1] != scales.shape[:-1] or packed.shape[-1] * 2 != scales.shape[-1] * GROUP:
        raise Meaningless(f"MXFP4 is {list(packed.shape)} with scales {list(scales.shape)}")
    if bool((scales == 255).any()):
        raise Meaningless("a scale is no number")
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    numbers = torch.tensor([*_E2M1, *(-it for it in _E2M1)])[codes]
    return numbers * (scales.double() - 127).exp2().float().repeat_interleave(GROUP, -1)


def _experts(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's ``[E, N, K / 32, 16]`` and ``[E, N, K / 32]`` to ``[E, K, N]``."""
    if blocks.dim() != 4:
        raise Meaningless(f"blocks of experts are {list(blocks.shape)}")
    return _unpacked(blocks.flatten(2), scales).transpose(1, 2).contiguous()


def _meaning(config: Any, values: Mapping[str, Any]) -> Meaning:
    readers = {
        "fp8": _fp8,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "quark": _quark,
        "mxfp4": _mxfp4,
    }
    if not isinstance(config, dict) or str(config.get("quant_method")) not in readers:
        raise Meaningless("another method")
    try:
        return readers[config["quant_method"]](config, values)
    except (TypeError, AttributeError, KeyError, ValueError, re.error) as error:
        raise Meaningless(f"no such configuration: {error!r}") from error


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise Meaningless(f"{pattern!r} is no regular expression") from error


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(it, str) for it in value):
        raise Meaningless(f"{value!r} is no list of names")
    return value


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Meaningless(what)


def _fp8(config: Mapping[str, Any], values: Mapping[str, Any]) -> Meaning:
    block, activations = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    _require(activations in ("static", "dynamic"), f"activation_scheme {activations!r}")
    if block is not None:
        _require(isinstance(block, list) and len(block) == 2 and all(type(it) is int for it in block), f"{block!r}")
    ignored = [*_names(config.get("modules_to_not_convert")), *_names(config.get("ignored_layers"))]
    return Meaning(
        "weight_scale" if block is None else "weight_scale_inv",
        lambda module: not any(f".{it}." in f".{module}." or _matches(it, module) for it in ignored),
        None if block is None else (block[0], block[1]),
        activations == "static",
    )


def _compressed(config: Mapping[str, Any], values: Mapping[str, Any]) -> Meaning:
    groups = list(config["config_groups"].values())
    _require(len(groups) == 1, "groups")
    weights, inputs = groups[0]["weights"], groups[0]["input_activations"]
    _require(inputs is not None, "weights alone")
    for numbers in (weights, inputs):
        kind = (numbers["num_bits"], numbers["type"])
        _require(kind == (8, "float") and type(kind[0]) is int, f"numbers of {kind}")
        _require(numbers.get("symmetric", True) is True, "zero points")
    _require(weights.get("dynamic", False) is False, "weights whose scales are made later")
    strategy, dynamic = weights["strategy"], inputs.get("dynamic", False)
    _require(strategy in ("tensor", "channel", "block"), f"strategy {strategy!r}")
    _require(dynamic in (True, False) and type(dynamic) is bool, f"dynamic={dynamic!r}")
    block = weights["block_structure"] if strategy == "block" else None
    if isinstance(block, str):
        block = [int(it) for it in block.split("x")]
    ignored, targets = _names(config.get("ignore")), _names(groups[0]["targets"])

    def named(module: str, patterns: list[str]) -> bool:
        return any(_matches(it[3:], module) if it.startswith("re:") else it in (module, "Linear") for it in patterns)

    def quantised(module: str) -> bool:
        return named(module, targets) and not named(module, ignored)

    _require(values.get("tie_word_embeddings") is True or not quantised("lm_head"), "a quantised head")
    _require(not config.get("transform_config"), "transforms")
    return Meaning("weight_scale", quantised, None if block is None else (block[0], block[1]), not dynamic)


def _modelopt(config: Mapping[str, Any], values: Mapping[str, Any]) -> Meaning:
    inner = config.get("quantization", config)
    _require(inner.get("quant_algo") == "FP8", "another algorithm")
    ignored = [*_names(inner.get("ignore")), *_names(inner.get("exclude_modules"))]
    return Meaning("weight_scale", lambda module: not _excluded(module, ignored), None, static=True)


def _excluded(module: str, patterns: list[str]) -> bool:
    return any(
        _matches(it[3:], module) if it.startswith("re:") else fnmatch.fnmatch(module, it) or f".{it}." in f".{module}."
        for it in patterns
    )


def _quark(config: Mapping[str, Any], values: Mapping[str, Any]) -> Meaning:
    common = config["global_quant_config"]
    weight, inputs, excluded = common["weight"], common["input_tensors"], _names(config.get("exclude"))
    _require(not config.get("layer_type_quant_config"), "schemes by type")
    for single in (config.get("layer_quant_config") or {}).values():
        _require(all((single or {}).get(it) == common[it] for it in ("weight", "input_tensors")), "several schemes")
    _require(weight.get("is_dynamic") in (None, False), "weights whose scales are made later")

    def quantised(module: str) -> bool:
        return not _excluded(module, excluded)

    if weight["dtype"] == "fp4":
        kind = (weight["qscheme"], weight["group_size"], weight["scale_format"])
        _require(kind == ("per_group", GROUP, "e8m0") and inputs is None, f"fp4 of {kind}")
        return Meaning("weight_scale", quantised, packed=True)
    _require(weight["dtype"] == inputs["dtype"] == "fp8_e4m3", "other numbers")
    _require(weight["qscheme"] in ("per_tensor", "per_channel"), "another scheme")
    return Meaning("weight_scale", quantised, None, not inputs.get("is_dynamic"))


def _mxfp4(config: Mapping[str, Any], values: Mapping[str, Any]) -> Meaning:
    _require(values.get("model_type") == "gpt_oss", "another model")
    left_out = _names(config.get("modules_to_not_convert"))
    _require(not any(_excluded("model.layers.0.mlp.experts", [it]) for it in left_out), "experts left out")
    return Meaning("", lambda module: False, experts_alone=True)
