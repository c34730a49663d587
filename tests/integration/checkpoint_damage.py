"""Ways in which a checkpoint can be wrong, or not one of ours, each done to a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.questions import checkpoint

#: A tensor of the checkpoint that is damaged.
NORM = "model.layers.0.self_attn.q_norm.weight"
#: An architecture that both frameworks have and we have not.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 256,
}

#: A mixture of experts, without its weights.
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}

#: Attention over latents, without its weights.
LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def truncate(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def use_opt(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(OPT))


def use_pickle(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def leave_out_the_draft(folder: Path) -> None:
    """A DeepSeek-V3 without the tensors of the layer behind its last."""
    source = Path(checkpoint("deepseek_v3"))
    shutil.copy(source / "config.json", folder)
    layer = f"model.layers.{json.loads((source / 'config.json').read_text())['num_hidden_layers']}."
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}
    save_file(kept, folder / "model.safetensors")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "sound": lambda folder: None,
    "opt": use_opt,
    "a mixture": lambda folder: (folder / "config.json").write_text(json.dumps(MIXTURE)),
    "sinks": lambda folder: shutil.copy(Path(checkpoint("gpt_oss")) / "config.json", folder),
    "latents": lambda folder: (folder / "config.json").write_text(json.dumps(LATENTS)),
    "latents with two layers that draft": lambda folder: (folder / "config.json").write_text(
        json.dumps({**LATENTS, "num_nextn_predict_layers": 2})
    ),
    "latents with no layer that drafts": lambda folder: (folder / "config.json").write_text(
        json.dumps({**LATENTS, "num_nextn_predict_layers": 0})
    ),
    "latents without layers that draft": leave_out_the_draft,
    "pickled": use_pickle,
    "quantised": lambda folder: edit_config(
        folder,
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    ),
    "quantised in small blocks": lambda folder: edit_config(
        folder,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
    ),
    "quantised to fp8": lambda folder: edit_config(
        folder, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
    ),
    "unknown rope": lambda folder: edit_config(
        folder, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "missing tensor": lambda folder: edit_tensors(folder, **{NORM: None}),
    "unexpected tensor": lambda folder: edit_tensors(folder, **{"model.extra.weight": torch.zeros(2)}),
    "misshapen tensor": lambda folder: edit_tensors(folder, **{NORM: torch.zeros(63)}),
    "truncated": lambda folder: truncate(folder, 1_000_000),
    "truncated header": lambda folder: truncate(folder, 100),
}


def damaged(name: str, parent: Path) -> str:
    """The folder of a copy of Qwen3's checkpoint under `parent`, wrong in the way of `DAMAGES` that `name` says."""
    folder = parent / name.replace(" ", "-")
    shutil.copytree(checkpoint("qwen3"), folder)
    DAMAGES[name](folder)
    return str(folder)
