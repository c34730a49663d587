"""Small random checkpoints of models with two kinds of attention, with a layer that drafts, and what they answer.

As Transformers saves them, with the keys and the layer that published ones have beside. Weights are such that logits
are far apart, that states remember, and that the draft is right now and then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atom_core.standalone import Runner

VOCABULARY, HIDDEN = 512, 64
#: Tokens from here on are special: they are in no prompt and no answer.
NUM_PLAIN = 500
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = {**ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "eos_token_id": 511,
    "bos_token_id": 510,
    "pad_token_id": 509,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}


@dataclass(frozen=True)
class Hybrid:
    """A family: the architecture, and how Transformers makes one."""

    architecture: str
    config: str
    """The class of its text's configuration."""
    values: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys that published checkpoints have, and that Transformers does not save."""
    wrapper: str = ""
    """The class of the configuration around that, of a model with images."""


_QWEN3_5 = {**COMMON, "rope_parameters": MROPE}
_EXTRA = {"full_attention_interval": 4, "mtp_num_hidden_layers": 1}
HYBRIDS = {
    "qwen3_next": Hybrid(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**COMMON, **MIXTURE, "norm_topk_prob": True, "decoder_sparse_step": 1, "rope_parameters": ROPE},
        {"full_attention_interval": 4, "rope_theta": 1e7},
    ),
    "qwen3_5": Hybrid("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _QWEN3_5, _EXTRA),
    "qwen3_5_moe": Hybrid("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_QWEN3_5, **MIXTURE}, _EXTRA),
    "qwen3_5_vl": Hybrid(
        "Qwen3_5ForConditionalGeneration", "Qwen3_5TextConfig", _QWEN3_5, _EXTRA, wrapper="Qwen3_5Config"
    ),
    "qwen3_5_moe_vl": Hybrid(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeTextConfig",
        {**_QWEN3_5, **MIXTURE},
        _EXTRA,
        wrapper="Qwen3_5MoeConfig",
    ),
}


def make_hybrid(folder: Path, name: str, *, extra: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write a checkpoint of a family.

    Args:
        folder: that is made.
        name: one of :data:`HYBRIDS`.
        extra: instead of the keys that Transformers does not save.
        changes: of the text's configuration.
    """
    import transformers

    hybrid = HYBRIDS[name]
    config = getattr(transformers, hybrid.config)(**{**hybrid.values, **changes})
    if hybrid.wrapper:
        config = getattr(transformers, hybrid.wrapper)(
            text_config=config.to_dict(),
            vision_config=VISION,
            image_token_id=500,
            video_token_id=501,
            vision_start_token_id=502,
            vision_end_token_id=503,
        )
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    model = getattr(transformers, hybrid.architecture)(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_values(key, parameter.shape, made))
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        embedding.mul_(0.7)
        # The next token is often the present one and 1; otherwise the states decide.
        head.copy_(torch.roll(embedding, 1, 0) / 8 + torch.randn(head.shape, generator=made) / 16)
        head[NUM_PLAIN:] = 0.0  # some other token is always likelier
    model.config.architectures = [hybrid.architecture]
    model.save_pretrained(folder)
    _add_draft(folder, made)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values.get("text_config", values).update(hybrid.extra if extra is None else extra)
    path.write_text(json.dumps(values, indent=1))
    _save_tokenizer(folder)
    return folder


def _values(name: str, shape: torch.Size, made: torch.Generator) -> torch.Tensor:
    random = torch.randn(shape, generator=made)
    if name.endswith("A_log"):
        return torch.log(torch.rand(shape, generator=made) * 0.4 + 0.01)
    if name.endswith("dt_bias"):
        return random - 2
    if "norm" in name.rsplit(".", 2)[-2]:
        return random * 0.2 + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
    if random.ndim < 2:
        return random * 0.02
    return random / (1.0 if "embed" in name else shape[1:].numel() ** 0.5)


def _add_draft(folder: Path, made: torch.Generator) -> None:
    """Put the layer that drafts into the file: a copy of the last layer's shapes, with norms and a projection."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    last = f"layers.{COMMON['num_hidden_layers'] - 1}."
    layer = {key.split(last)[1]: value for key, value in weights.items() if last in key and "visual" not in key}
    draft = {f"mtp.layers.0.{key}": _values(key, value.shape, made) for key, value in layer.items()}
    hidden = len(layer["input_layernorm.weight"])
    random = torch.randn(hidden, hidden, generator=made) / hidden**0.5
    draft["mtp.fc.weight"] = torch.cat((3 * torch.eye(hidden), random), 1)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        draft[f"mtp.{norm}.weight"] = torch.randn(hidden, generator=made) * 0.2
    save_file({**weights, **draft}, path, metadata={"format": "pt"})


def _save_tokenizer(folder: Path) -> None:
    """A token for each byte, as the tokenizers that Transformers has for these models read it; others say nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = [f"<{token}>" for token in range(len(alphabet), VOCABULARY)]
    words = Tokenizer(models.BPE({it: token for token, it in enumerate([*alphabet, *others])}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = {"eos_token": "<511>", "bos_token": "<510>", "pad_token": "<509>", "unk_token": "<508>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def some_tokens(count: int, seed: int) -> list[int]:
    """Random tokens, none of them special."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_PLAIN, (count,), generator=made).tolist()


@dataclass(frozen=True)
class Expected:
    """Transformers' model of a checkpoint, in float32, and ours."""

    model: nn.Module
    ours: Runner

    @classmethod
    def of(cls, folder: Path) -> Expected:
        """Load both."""
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return cls(theirs.eval(), Runner(folder))

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The ``count`` most likely tokens after each prompt, by itself: by Transformers' model.

        It says so of our model's own answers, each in one pass, which takes a tenth of the time of an answer of its.
        Where it would take another token, that is what is found, and the test that looks for it fails.
        """
        found = []
        for prompt, answer in zip(prompts, self.ours.generate(prompts, count), strict=True):
            logits = self.model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
            found.append(logits.argmax(-1).tolist())
        return found
