"""A random mixture of experts with a tokenizer, and what it answers: by Hugging Face, or in FP8 by our model alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atom_core.kernels.select import Target
from atom_core.standalone import Runner
from tests.aiter_fake import fake_aiter
from tests.integration.questions import checkpoint
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, Format, make_fp8
from tests.unit.core.mtp_checkpoints import make_good_mtp
from tests.unit.core.mxfp4_checkpoints import make_gpt_oss, make_plain_gpt_oss

PROMPTS = ("Tom has 3 apples.", "A", "How many are left when 12 of 40 are sold?")
NUM_TOKENS = 16
CANDIDATES = tuple(f"{count} birds and {7 * count % 23} cats are" for count in range(1, 201))
#: Prompts of a quantised mixture, and how many must be answered alike: engines sum attention in another order, in 16
#: bits, which sometimes moves a number of e4m3 to the next, and that another expert into the chosen ones.
NUM_FP8_PROMPTS, FP8_ALIKE = 24, 0.9
FP8_FORMS = {form.name: form for form in (*FORMATS, *BLOCK_FORMATS)}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}

#: What aiter has kernels for: heads as DeepSeek's own models have them, groups of more than two experts, whole blocks.
DEEPSEEKS_OWN = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 256,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
}

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
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 48,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        # As checkpoints say, and Hugging Face's class does not.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4_moe": {"moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2, "routed_scaling_factor": 1.5},
}


@dataclass(frozen=True)
class Drafted:
    """What a model with layers that draft answers, and how many of their drafts are right."""

    answers: list[list[int]]
    """To each of :data:`PROMPTS`."""
    right: dict[int, int]
    """By how many tokens are drafted at a time: drafts that are right, over all answers."""


def make_drafting(directory: Path, num_drafts: Sequence[int] = (1, 3), **settings: Any) -> Drafted:
    """Save a random DeepSeek-V3 with a layer that drafts, about half of whose first drafts are right."""
    _save_random(directory, "deepseek_v3", **{"num_hidden_layers": 4, **settings})
    # The last one drafts.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    reference = make_good_mtp(directory, model, len(model.model.layers) - 1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    longer = [reference.greedy(prompt, NUM_TOKENS + max(num_drafts)) for prompt in prompts]
    pairs = list(zip(prompts, longer, strict=True))
    right = {count: sum(sum(reference.right_drafts(*it, count, NUM_TOKENS)) for it in pairs) for count in num_drafts}
    return Drafted([answer[:NUM_TOKENS] for answer in longer], right)


def make_mixture(directory: Path, family: str = "qwen3_moe", **settings: Any) -> list[list[int]]:
    """Save a random model of one of :data:`FAMILIES` in float32.

    Args:
        directory: where to.
        family: one of :data:`FAMILIES`.
        settings: of its configuration, in place of those here.

    Returns:
        Hugging Face's greedy tokens for each of :data:`PROMPTS`.
    """
    model = _save_random(directory, family, **settings)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [_greedy(model, tokenizer.encode(prompt)) for prompt in PROMPTS]


def _save_random(directory: Path, family: str, **settings: Any) -> Any:
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
    config = AutoConfig.for_model(family, **{**values, **FAMILIES[family], **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):  # which is 0 in a new model
            tensor.normal_(std=0.1)
    model.save_pretrained(directory)
    return model


def make_fp8_mixture(directory: Path, family: str, form: Format, **settings: Any) -> tuple[Path, dict[str, int]]:
    """See :func:`make_quantised_mixture`."""
    return make_quantised_mixture(directory, family, partial(make_fp8, form=form), **settings)


def make_served(
    directory: Path, model: str, form: str | None, settings: dict[str, Any] | None
) -> tuple[Path, dict[str, int]]:
    """What an engine serves: a folder, and of a random model prompts, each with the token that our model alone gives.

    Args:
        directory: for what is made.
        model: a trained checkpoint, or with ``settings`` a family.
        form: one of :data:`FP8_FORMS`, of a copy in FP8; None: the trained checkpoint itself.
        settings: of random weights in place of the trained ones.
    """
    if form is None:
        return Path(checkpoint(model)), {}
    if settings is not None:
        return make_fp8_mixture(directory, model, FP8_FORMS[form], **settings)
    make_fp8(Path(checkpoint(model)), directory, FP8_FORMS[form])
    return directory, {}


def make_quantised_mixture(
    directory: Path,
    family: str,
    quantise: Callable[[Path, Path], None],
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> tuple[Path, dict[str, int]]:
    """Save one under ``directory`` as ``quantise`` does, of sizes that two ranks can share by whole blocks.

    Args:
        directory: what is made is under it.
        family: one of :data:`FAMILIES`.
        quantise: given a checkpoint and where to.
        dtype: what our model alone computes in.
        settings: of the configuration, in place of those here.

    Returns:
        Its folder; the prompts of whose first token our model alone is surest, and that token.
    """
    source, target = directory / "source", directory / "quantised"
    source.mkdir(parents=True)
    # Mixtral norms no queries and keys: with larger weights one key gets all attention, and 16 bits decide which.
    latents = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "head_dim", "v_head_dim"), 64)
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"moe_intermediate_size": 256},
        "mixtral": {"initializer_range": 0.1},
        "deepseek_v3": {"moe_intermediate_size": 256, "q_lora_rank": 128, "initializer_range": 0.1, **latents},
    }
    make_mixture(source, family, **{"head_dim": 128, **own[family], **settings})
    quantise(source, target)
    runner = Runner(target, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(target)
    found: list[tuple[float, str, int]] = []
    for prompt in CANDIDATES:
        (first, second), (token, _) = (
            it.tolist() for it in runner.logits(tokenizer.encode(prompt))[-1].float().topk(2)
        )
        found.append((first - second, prompt, token))
    return target, {prompt: token for _, prompt, token in sorted(found, reverse=True)[:NUM_FP8_PROMPTS]}


def first_tokens_on(arch: str, folder: Path, prompts: Iterable[str]) -> dict[str, int]:
    """By prompt, the first token of our model alone with the kernels of an AMD GPU, aiter's by the fake.

    gfx942 has an FP8 of its own and other scales for it, and so rounds otherwise than a checkpoint's reference.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kernels = {"embedding": "reference", "qk_norm_rope_cache": "reference"}
    with fake_aiter(arch):
        runner = Runner(folder, dtype=torch.bfloat16, target=Target("rocm", arch), kernels=kernels)
        return {prompt: runner.generate([tokenizer.encode(prompt)], 1)[0][0] for prompt in prompts}


def share_alike(found: list[list[int]], expected: dict[str, int]) -> float:
    """Of the answers ``found``, how many begin with the token that is expected."""
    return sum(tokens[0] == token for tokens, token in zip(found, expected.values(), strict=True)) / len(expected)


def make_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Save a GPT-OSS with experts in MXFP4, and the same with the numbers that these stand for."""
    make_mixture(directory, "gpt_oss")
    packed, rounded = directory / "packed", directory / "rounded"
    make_gpt_oss(directory, packed)
    make_plain_gpt_oss(directory, rounded)
    return packed, rounded


@torch.inference_mode()
def _greedy(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    found: list[int] = []
    for _ in range(NUM_TOKENS):
        found.append(int(model(torch.tensor([tokens + found])).logits[0, -1].argmax()))
    return found
