"""Small random checkpoints, made by Hugging Face's own models: the oracle for what ours answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()

HELD_OUT = Path(__file__).parents[2] / "evaluation" / "heldout.jsonl"
VOCABULARY = 97
NUM_LAYERS = 3
MAX_POSITION = 64

#: Largest |difference| of logits, as a share of their spread: float32 sums in another order differ by some 1e-6 of it,
#: and the smallest mistake in a formula (an off-by-one in a window, a wrong epsilon) by more than 1e-3.
LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Family:
    """One architecture and the settings that make its own features matter in a model of three layers."""

    architecture: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")


FAMILIES = (
    Family("LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Family("MistralForCausalLM", "mistral", {"sliding_window": 7}),
    Family("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    Family("Qwen3ForCausalLM", "qwen3"),
)


def rope_variants(head_dim: int) -> dict[str, dict[str, Any]]:
    """Every rope variant with parameters that change all pairs at the lengths of these tests."""
    pairs = head_dim // 2
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.0 + 0.5 * pair for pair in range(pairs)],
    }
    return {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 2.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "yarn": yarn,
        "yarn not truncated": {**yarn, "truncate": False},
        "yarn with betas": {**yarn, "beta_fast": 8.0, "beta_slow": 0.5},
        "yarn with mscale": {**yarn, "mscale": 0.7, "mscale_all_dim": 0.4},
        "yarn with attention_factor": {**yarn, "attention_factor": 1.3},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        # Which factors apply depends on whether the served length (48) exceeds the original one.
        "longrope, short factors": {**longrope, "original_max_position_embeddings": 48},
        "longrope, long factors": {**longrope, "original_max_position_embeddings": 24},
        "longrope with attention_factor": {
            **longrope,
            "original_max_position_embeddings": 24,
            "attention_factor": 1.2,
        },
    }


def make_config(family: Family, rope: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """A configuration object of ``family``; ``settings`` override the tests' own."""
    values = {
        "architectures": [family.architecture],
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": {"rope_theta": 10000.0, **(rope or {"rope_type": "default"})},
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **family.settings,
        **settings,
    }
    return AutoConfig.for_model(family.model_type, **values)


def make_model(directory: Path, config: Any, seed: int = 0) -> Any:
    """A random float32 model of ``config``, saved to ``directory``."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms start at 1 and biases at 0, where a mistake would not show
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    parameters = dict(model.named_parameters())
    for name, buffer in model.state_dict().items():
        if name not in parameters and buffer.is_floating_point():  # as a router's correction, which starts at 0
            buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    return model


def random_tokens(count: int, seed: int = 1) -> list[int]:
    """A seeded prompt."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def load_trained(directory: Path) -> tuple[Any, list[int]]:
    """The trained float32 model in ``directory`` and the longest held-out question, with examples in front."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    prompts = [row["prompt"] for row in held_out()]
    return model, AutoTokenizer.from_pretrained(directory)(max(prompts, key=len)).input_ids


def held_out() -> list[dict[str, str]]:
    """The questions that no checkpoint was trained on."""
    return [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]


@torch.inference_mode()
def routed_experts(model: Any, tokens: list[int]) -> dict[int, list[list[int]]]:
    """The experts that Hugging Face's routers choose: by layer, of each token, in ascending order."""
    found: dict[int, list[list[int]]] = {}

    def note(index: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = args[1] if len(args) > 1 else kwargs.get("top_k_index", kwargs.get("router_indices"))
            found[index] = chosen.sort(-1).values.tolist()

        return hook

    layers = [layer for layer in enumerate(model.model.layers) if hasattr(layer[1].mlp, "experts")]
    handles = [layer.mlp.experts.register_forward_pre_hook(note(index), with_kwargs=True) for index, layer in layers]
    model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return found


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Hugging Face's logits at every position, ``[T, vocabulary]``."""
    return model(torch.tensor([tokens])).logits[0].float()


@torch.inference_mode()
def logits_token_by_token(model: Any, tokens: list[int]) -> torch.Tensor:
    """The same, one token a call over Hugging Face's own cache."""
    cache, rows = None, []
    for token in tokens:
        result = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        rows.append(result.logits[0, -1].float())
    return torch.stack(rows)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Hugging Face's ``count`` most likely tokens after ``prompt``; none of them ends the text."""
    tokens, cache, found = prompt, None, []
    for _ in range(count):
        result = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        tokens = [int(result.logits[0, -1].argmax())]
        found += tokens
    return found


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest |difference| as a share of the truth's spread."""
    return ((found.float() - truth).abs().max() / (truth.max() - truth.min())).item()


def bfloat16_distances(model: Any, ours: Callable[[list[int]], torch.Tensor]) -> tuple[float, float]:
    """(ours, theirs): how far bfloat16 logits are from the float32 truth, root mean square over a few prompts.

    A single largest difference is chance; over some ten thousand logits, rounding is alike from one machine to another.
    ``model`` is in bfloat16 afterwards.
    """
    prompts = [random_tokens(40, seed) for seed in range(4)]
    truth = torch.cat([logits(model, prompt) for prompt in prompts])
    theirs = torch.cat([logits(model.to(torch.bfloat16), prompt) for prompt in prompts])
    mine = torch.cat([ours(prompt).float().cpu() for prompt in prompts])
    return tuple((found - truth).square().mean().sqrt().item() for found in (mine, theirs))


def old_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as checkpoints older than transformers 5 have it: no ``rope_parameters``, no ``layer_types``."""
    rope = dict(values["rope_parameters"])
    plain = {key: value for key, value in values.items() if key not in ("rope_parameters", "layer_types")}
    plain["rope_theta"] = rope.pop("rope_theta")
    plain["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return plain
