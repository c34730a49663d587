"""A random mixture of experts with a tokenizer, and what it answers: by Hugging Face, or in FP8 by our model alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, Qwen3MoeConfig

from atom_core.standalone import Runner
from tests.integration.questions import checkpoint
from tests.unit.core.fp8_checkpoints import Format, make_fp8

PROMPTS = ("Tom has 3 apples.", "A", "How many are left when 12 of 40 are sold?")
NUM_TOKENS = 16
_CANDIDATES = tuple(f"{count} birds and {7 * count % 23} cats are" for count in range(1, 81))
#: Prompts of an FP8 mixture, and how many must be answered alike: engines sum attention in another order, in 16 bits,
#: which sometimes moves a number of e4m3 to the next, and that another expert into the chosen ones.
NUM_FP8_PROMPTS, FP8_ALIKE = 24, 0.9


def make_mixture(directory: Path, family: str = "qwen3_moe", **settings: Any) -> list[list[int]]:
    """Save a random Qwen3-MoE or Mixtral in float32: eight experts, of which a token has two.

    Args:
        directory: where to.
        family: "qwen3_moe" or "mixtral".
        settings: of its configuration, in place of those here.

    Returns:
        Hugging Face's greedy tokens for each of :data:`PROMPTS`.
    """
    source = Path(checkpoint("qwen3"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
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
    if family == "qwen3_moe":  # with one layer that is no mixture
        own = {"moe_intermediate_size": 64, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}
        config = Qwen3MoeConfig(**{**values, **own, **settings})
    else:
        config = MixtralConfig(**{**values, "num_local_experts": 8, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(directory)
    return [_greedy(model, tokenizer.encode(prompt)) for prompt in PROMPTS]


def make_fp8_mixture(directory: Path, family: str, form: Format) -> tuple[Path, dict[str, int]]:
    """Save one in FP8 under ``directory``, of sizes that two ranks can share by whole blocks.

    Returns:
        Its folder; the prompts of whose first token our model alone is surest, in bfloat16, and that token.
    """
    source, target = directory / "source", directory / "fp8"
    source.mkdir(parents=True)
    # Mixtral norms no queries and keys: with larger weights one key gets all attention, and 16 bits decide which.
    own = {"qwen3_moe": {"moe_intermediate_size": 256}, "mixtral": {"initializer_range": 0.1}}
    make_mixture(source, family, head_dim=128, **own[family])
    make_fp8(source, target, form)
    runner = Runner(target, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(target)
    found: list[tuple[float, str, int]] = []
    for prompt in _CANDIDATES:
        (first, second), (token, _) = (
            it.tolist() for it in runner.logits(tokenizer.encode(prompt))[-1].float().topk(2)
        )
        found.append((first - second, prompt, token))
    return target, {prompt: token for _, prompt, token in sorted(found, reverse=True)[:NUM_FP8_PROMPTS]}


def share_alike(found: list[list[int]], expected: dict[str, int]) -> float:
    """Of the answers ``found``, how many begin with the token that is expected."""
    return sum(tokens[0] == token for tokens, token in zip(found, expected.values(), strict=True)) / len(expected)


@torch.inference_mode()
def _greedy(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    found: list[int] = []
    for _ in range(NUM_TOKENS):
        found.append(int(model(torch.tensor([tokens + found])).logits[0, -1].argmax()))
    return found
