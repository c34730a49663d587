"""A random mixture of experts with a tokenizer, and what Hugging Face answers with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.integration.questions import checkpoint
from tests.unit.core.mxfp4_checkpoints import quantize

PROMPTS = ("Tom has 3 apples.", "A", "How many are left when 12 of 40 are sold?")
NUM_TOKENS = 16
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

#: Eight experts in each family's own words, of which a token has two; where it can, with one layer that is no mixture.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {
        "num_local_experts": 8,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "glm4_moe": {"moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2, "routed_scaling_factor": 1.5},
}


def make_mixture(directory: Path, family: str = "qwen3_moe") -> list[list[int]]:
    """Save a random model of one of :data:`FAMILIES` in float32.

    Returns:
        Hugging Face's greedy tokens for each of :data:`PROMPTS`.
    """
    source = Path(checkpoint("qwen3"))
    for name in _TOKENIZER:
        shutil.copy(source / name, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(family, **values, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):  # which is 0 in a new model
            tensor.normal_(std=0.1)
    model.save_pretrained(directory)
    return [_greedy(model, tokenizer.encode(prompt)) for prompt in PROMPTS]


def make_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Save a GPT-OSS with experts in MXFP4, and the same with the numbers that these stand for."""
    make_mixture(directory, "gpt_oss")
    packed, rounded = directory / "packed", directory / "rounded"
    quantize(directory, packed, rounded)
    for folder in (packed, rounded):
        for name in _TOKENIZER:
            shutil.copy(directory / name, folder)
    return packed, rounded


@torch.inference_mode()
def _greedy(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    found: list[int] = []
    for _ in range(NUM_TOKENS):
        found.append(int(model(torch.tensor([tokens + found])).logits[0, -1].argmax()))
    return found
