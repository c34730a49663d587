"""Random hybrids of linear and full attention with a layer that drafts, and what they answer: by our model alone, whose
logits are Hugging Face's (``tests/unit/core/models/test_qwen3_5.py``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, make_fp8

#: The model type of each architecture; a wrapper has that of its text inside.
TYPES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
#: Heads of which vLLM's CPU attention has kernels, and a state as large as the keys and values of 64 tokens.
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 1024,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MROPE = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
_FULL = 3
#: Prompts share so many tokens, which several blocks of a cache hold.
_SHARED = 184
#: Of one token and more, around the chunks of Gated DeltaNet, of as many tokens behind 48 as verify 1, 2 or 3 drafts,
#: and shortly before the end of a block, past which a request must wait for another one.
LENGTHS = (1, 2, 7, 50, 51, 52, 58, 63, 64, 65, 120, 310)


@dataclass(frozen=True)
class Hybrid:
    """A checkpoint and what it answers."""

    folder: str
    prompts: list[list[int]]
    answers: list[list[int]]
    """Greedy tokens for each prompt."""


def make_hybrid(
    directory: Path, architecture: str, num_tokens: int = 16, lengths: Sequence[int] = LENGTHS, **changes: Any
) -> Hybrid:
    """Save one in float32, with ``changes`` of its configuration; some of its drafts are right."""
    generator = torch.Generator().manual_seed(1)
    kind, wrapped = TYPES[architecture], "Conditional" in architecture
    settings = _SIZES if kind == "qwen3_5_text" else {**_SIZES, **_MIXTURE}
    if kind != "qwen3_next":
        settings = {**settings, "rope_parameters": {**settings["rope_parameters"], **_MROPE}}
    config = AutoConfig.for_model(kind, **{**settings, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_fill(name, parameter, generator))
        # The next token is often the last one and 1, which a draft sees; the layers decide when it is not.
        embedded = model.get_input_embeddings().weight
        head = torch.roll(embedded, 1, 0) / 8 + torch.randn(embedded.shape, generator=generator) / 16
        model.get_output_embeddings().weight.copy_(head)
    model.save_pretrained(directory)
    _add_draft(directory, kind, generator)
    if wrapped:
        _wrap(directory, architecture, kind.removesuffix("_text"))
    shared = torch.randint(0, 512, (_SHARED,), generator=generator).tolist()
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]
    prompts += [[*shared, number, number + 1] for number in range(4)]
    return Hybrid(str(directory), prompts, Runner(directory).generate(prompts, num_tokens))


#: Of a hybrid each of whose weights is whole blocks of FP8.
WHOLE_BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 128,
    "linear_key_head_dim": 64,
    "rope_parameters": {**_SIZES["rope_parameters"], **_MROPE, "partial_rotary_factor": 0.125},
}
_NOT_CONVERTED = ("in_proj_a", "in_proj_b", "conv1d")


def in_fp8_blocks(hybrid: Hybrid, directory: Path) -> Hybrid:
    """A dense one of `WHOLE_BLOCKS` with weights in FP8, its draft's too, and what that answers in bfloat16.

    vLLM serves weights in FP8 in no other dtype.
    """
    form = BLOCK_FORMATS[0]
    layers = json.loads(Path(hybrid.folder, "config.json").read_text())["num_hidden_layers"]
    left = [f"model.layers.{layer}.linear_attn.{name}" for layer in range(layers) for name in _NOT_CONVERTED]
    config = {**form.config, "modules_to_not_convert": ["lm_head", "mtp.fc", *left]}
    make_fp8(Path(hybrid.folder), directory, replace(form, config=config))
    num_tokens = len(hybrid.answers[0])
    return Hybrid(
        str(directory), hybrid.prompts, Runner(directory, dtype=torch.bfloat16).generate(hybrid.prompts, num_tokens)
    )


def doubt(hybrid: Hybrid, answers: Sequence[Sequence[int]], dtype: torch.dtype) -> list[float]:
    """By how much a logit was above that of the token taken instead, at most in each answer: by our model alone.

    Sums in another order round otherwise, and much otherwise in bfloat16. So an engine's answers may turn where two
    tokens are nearly as likely; what a fault gives is far from likely.
    """
    runner, found = Runner(Path(hybrid.folder), dtype=dtype), []
    for prompt, answer in zip(hybrid.prompts, answers, strict=True):
        logits = runner.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :].float()
        taken = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        found.append((logits.amax(1) - taken).max().item())
    return found


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """States that remember, norms that are not the identity, and logits that differ."""
    values = torch.randn(parameter.shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(torch.rand(parameter.shape, generator=generator) * 0.4 + 0.01)
    if name.endswith("dt_bias"):
        return values - 2
    if parameter.ndim == 1:
        return values * 0.2 + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
    return values * 0.7 if "embed" in name else values / parameter[0].numel() ** 0.5


def _add_draft(directory: Path, kind: str, generator: torch.Generator) -> None:
    """The layer of full attention again as ``mtp.layers.0``, which sees mostly the embedding."""
    file, config = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(file)
    size = len(tensors["model.norm.weight"])
    layer = f"model.layers.{_FULL}."
    copied = {it.removeprefix(layer): values.clone() for it, values in tensors.items() if it.startswith(layer)}
    own = {f"mtp.layers.0.{it}": values for it, values in copied.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"mtp.{name}.weight"] = torch.randn(size, generator=generator) * 0.2
    own["mtp.fc.weight"] = torch.cat((3 * torch.eye(size), torch.randn(size, size, generator=generator) / 8), 1)
    save_file({**tensors, **own}, file, metadata={"format": "pt"})
    if kind != "qwen3_next":  # whose published configurations do not count it
        config.write_text(json.dumps({**json.loads(config.read_text()), "mtp_num_hidden_layers": 1}))


def wrapped(folder: str, directory: Path) -> str:
    """A trained dense one as the text of a multimodal checkpoint, in ``directory``, which is made."""
    shutil.copytree(folder, directory)
    _wrap(directory, "Qwen3_5ForConditionalGeneration", "qwen3_5")
    return str(directory)


def _wrap(directory: Path, architecture: str, kind: str) -> None:
    """Make it a multimodal checkpoint's text; what sees is not there."""
    file, config = directory / "model.safetensors", directory / "config.json"
    renamed = {name.replace("model.", "model.language_model.", 1): it for name, it in load_file(file).items()}
    save_file({**renamed, "model.visual.merger.norm.weight": torch.ones(8)}, file, metadata={"format": "pt"})
    text = json.loads(config.read_text())
    outer = {"architectures": [architecture], "model_type": kind, "text_config": text, "dtype": "float32"}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: 508 + at for at, name in enumerate(names)}
    config.write_text(json.dumps({**outer, **tokens, "vision_config": vision, "tie_word_embeddings": False}))
