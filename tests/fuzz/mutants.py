"""What is changed in a checkpoint: its `config.json`, its tensors and their files, its index."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Values that some key has somewhere, and that few keys can have.
POOL: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 7, 64, 10**9, 0.0, 0.5, 1.0, 1.5, -2.5, 1e-6, float("nan"), float("inf"),
    "", "2", "false", "true", "silu", "gelu", "yarn", [], [1], ["full_attention"], {}, {"a": 1},
)  # fmt: skip
#: Keys of this and of sibling families, and of the tools that write files.
KEYS = (
    "attention_bias attention_dropout attn_logit_softcapping clip_qkv decoder_sparse_step dual_chunk_attention_config "
    "embedding_multiplier final_logit_softcapping first_k_dense_replace head_dim hidden_act intermediate_size "
    "layer_types llama_4_scaling logit_scale logits_scaling max_position_embeddings max_window_layers mlp_bias "
    "moe_intermediate_size n_group n_routed_experts n_shared_experts no_rope_layers norm_topk_prob num_experts "
    "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts num_nextn_predict_layers "
    "original_max_position_embeddings pad_token_id partial_rotary_factor pretraining_tp qk_layernorm qkv_bias "
    "residual_multiplier rms_norm_eps rope_interleave rope_scaling rope_theta routed_scaling_factor scoring_func "
    "sliding_window tie_word_embeddings tool_note topk_group topk_method torch_dtype unsloth_version use_qk_norm "
    "use_sliding_window vocab_size"
).split()
MODEL_TYPES = "llama mistral qwen2 qwen3 qwen3_moe mixtral gpt_oss glm4_moe deepseek_v2 deepseek_v3 granite cohere phi3"
LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "nonsense")
ROPES = {
    "factor": (1.0, 2, 4.0, 0, -1.0, "4", None),
    "original_max_position_embeddings": (16, 64, 0, None, "64"),
    "rope_theta": (1e4, 5e5, 1, 0, -5.0, None, "1e4", [1e4]),
    "beta_fast": (32, 1, 0, None, "32"),
    "beta_slow": (1, 32, 0, 1e6),
    "attention_factor": (1.0, 0.5, None),
    "mscale": (1.0, 0.707),
    "mscale_all_dim": (1.0, 0.707),
    "truncate": (True, False, None),
    "partial_rotary_factor": (1.0, 0.5, 0, "0.5", 2.0),
    "low_freq_factor": (1.0, 4.0),
    "high_freq_factor": (4.0, 1.0),
    "mrope_section": ([4, 6],),
    "finetuned": (True,),
}


#: Of a quantised checkpoint whose sizes have become others, the matrix is named that does not divide.
_OF_SIZES = ("FP8 block of 128 by 128", "share a scale in MXFP4")


@dataclass(frozen=True)
class Mutant:
    """One change."""

    kind: str
    """Its class, for the table."""
    change: str
    """What it is, for who reads of it."""
    names: tuple[str, ...]
    """Of which a refusal must name one."""


def mutate(folder: Path, rng: random.Random) -> Mutant:
    """Change one thing of the checkpoint in `folder`."""
    kinds: tuple[tuple[float, Callable[[Path, random.Random], Mutant]], ...] = (
        (0.42, _key),
        (0.20, _rope),
        (0.06, _names),
        (0.05, _layer_types),
        (0.12, _tensor),
        (0.08, _bytes),
        (0.07, _files),
    )
    change = rng.choices([it for _, it in kinds], [share for share, _ in kinds])[0]
    return change(folder, rng)


def _config(folder: Path, kind: str, changes: Mapping[str, Any], *names: str) -> Mutant:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    path.write_text(json.dumps(values))
    shown = ", ".join(f"{key}={'(removed)' if value is ... else repr(value)}" for key, value in changes.items())
    return Mutant(kind, shown, (*changes, *names))


def _key(folder: Path, rng: random.Random) -> Mutant:
    values = json.loads((folder / "config.json").read_text())
    key = rng.choice(sorted({*values, *KEYS} - {"architectures", "model_type", "rope_parameters"}))
    if key in values and rng.random() < 0.15:
        return _config(folder, "key removed", {key: ...})
    value, old = rng.choice(POOL), values.get(key)
    if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.5:
        value = rng.choice((old + 1, old - 1, old * 2, old // 2, -old, float(old), str(old), [old]))
    return _config(folder, "key changed" if key in values else "key added", {key: value}, *_OF_SIZES)


def _rope(folder: Path, rng: random.Random) -> Mutant:
    rope: dict[str, Any] = {"rope_type": rng.choice(["default", "linear", "dynamic", "yarn", "llama3", "spiral"])}
    for key in rng.sample(sorted(ROPES), rng.randint(1, 5)):
        rope[key] = rng.choice(ROPES[key])
    changes: dict[str, Any] = {rng.choice(["rope_parameters", "rope_scaling"]): rope}
    if rng.random() < 0.1:
        changes = {"rope_parameters": rng.choice(("yarn", [1], 1, {"full_attention": rope}))}
    if rng.random() < 0.2:
        changes["original_max_position_embeddings"] = 64
    return _config(folder, "rope", changes, "rope", *rope)


def _names(folder: Path, rng: random.Random) -> Mutant:
    if rng.random() < 0.8:
        return _config(folder, "model_type", {"model_type": rng.choice(MODEL_TYPES.split())}, "architectures")
    value = rng.choice((None, [], "LlamaForCausalLM", ["Bert"], [1]))
    return _config(folder, "architectures", {"architectures": value}, "Architecture")


def _layer_types(folder: Path, rng: random.Random) -> Mutant:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    kinds = [rng.choice(LAYERS[: rng.choice((1, 2, 2, 4))]) for _ in range(layers + rng.choice((0, 0, 0, 1, -1)))]
    changes: dict[str, Any] = {"layer_types": kinds}
    if rng.random() < 0.7:
        changes |= {"sliding_window": rng.choice((8, 16, 0, None)), "use_sliding_window": rng.choice((True, False))}
    return _config(folder, "layer_types", changes, "layer")


def _tensor(folder: Path, rng: random.Random) -> Mutant:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    what = rng.choice(("removed", "renamed", "misshapen", "of integers", "in float64", "in bfloat16", "twice", "head"))
    if what == "removed":
        del tensors[name]
    elif what == "renamed":
        tensors[f"{name}s"] = tensors.pop(name)
    elif what == "misshapen":
        rows = tensor if tensor.dim() else tensor.reshape(1)
        tensors[name] = torch.cat([rows, rows[:1]]) if rng.random() < 0.5 else rows[:-1].clone()
    elif what == "of integers":
        tensors[name] = tensor.to(torch.int32)
    elif what == "in float64":
        tensors[name] = tensor.double()
    elif what == "in bfloat16":
        tensors[name] = tensor.bfloat16()
    elif what == "twice":
        tensors[f"extra.{name}"] = tensor.clone()
    else:
        name = "lm_head.weight"
        tensors[name] = tensors["model.embed_tokens.weight"] * 1.5
        _config(folder, "", {"tie_word_embeddings": True})
    save_file(tensors, path, {"format": "pt"})
    return Mutant(f"tensor {what}", name, (name, folder.name, "tie_word_embeddings"))


def _bytes(folder: Path, rng: random.Random) -> Mutant:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    what = rng.choice(("cut", "emptied", "header cut", "header garbled", "offsets", "longer"))
    if what == "cut":
        content = content[: rng.randrange(8 + length, len(content))]
    elif what == "emptied":
        content = bytearray()
    elif what == "header cut":
        content = content[: rng.randrange(0, 8 + length)]
    elif what == "header garbled":
        for _ in range(3):
            content[8 + rng.randrange(length)] = rng.randrange(256)
    elif what == "offsets":
        header = json.loads(content[8 : 8 + length])
        entry = header[rng.choice(sorted(set(header) - {"__metadata__"}))]
        entry["data_offsets"] = [entry["data_offsets"][0] + rng.choice((-4, 4, -(10**6))), entry["data_offsets"][1]]
        text = json.dumps(header).encode()
        content = bytearray(struct.pack("<Q", len(text)) + text + bytes(content[8 + length :]))
    else:
        content += bytes(16)
    path.write_bytes(bytes(content))
    return Mutant(f"file {what}", path.name, (path.name,))


def _times(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """Other numbers; those that are quantised stay, for their scales are others then."""
    return tensor * factor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor


def _files(folder: Path, rng: random.Random) -> Mutant:
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    tensors = load_file(path)
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    places = {name: file for file, held in halves.items() for name in held}
    what = rng.choice(
        ("sharded", "shard absent", "no index", "both", "consolidated", "adapter", "garbled index", "path")
    )
    if what in ("consolidated", "adapter"):
        other = {f"of_{what}.{name}": _times(tensor, 2) for name, tensor in tensors.items()}
        save_file(
            other, folder / {"consolidated": "consolidated.safetensors", "adapter": "adapter_model.safetensors"}[what]
        )
        return Mutant(f"files: {what} beside", what, (folder.name,))
    for file, held in halves.items():
        factor = 2 if what == "both" else 1
        save_file({name: _times(tensors[name], factor) for name in held}, folder / file, {"format": "pt"})
    if what != "both":
        path.unlink()
    if what == "shard absent":
        (folder / rng.choice(list(halves))).unlink()
    if what == "garbled index":
        index.write_text(rng.choice(("{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}')))
    elif what == "path":
        index.write_text(json.dumps({"weight_map": dict.fromkeys(places, "../model.safetensors")}))
    elif what != "no index":
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return Mutant(f"files: {what}", what, (index.name, folder.name))
