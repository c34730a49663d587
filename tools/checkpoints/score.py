"""Greedy exact match of a checkpoint on the held-out prompts, and how sure it is of each token."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

#: What sets each family apart.
FEATURES = {
    "llama": "rope scaling",
    "mistral": "sliding window",
    "qwen2": "qkv bias",
    "qwen3": "q/k norm",
    "qwen3_moe": "experts in their order",
    "gpt_oss": "sinks",
    "glm4_moe": "shared expert",
    "deepseek_v2": "rope scaling",
    "deepseek_v3": "interleaved rope",
}
NEAR_TIE = 0.5
MAX_NEW_TOKENS = 64  # Far above the longest answer; reaching it counts as a wrong answer.


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], batch: int = 100
) -> Iterator[tuple[list[dict[str, str]], list[list[int]], list[list[int]], list[list[float]]]]:
    """By batch: its rows, their prompts and answers as tokens (up to end-of-text), and the answers' top-two margins."""
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in part]
        encoded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        output = model.generate(
            input_ids=encoded["input_ids"].to(model.device),
            attention_mask=encoded["attention_mask"].to(model.device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[:, encoded["input_ids"].shape[1] :].tolist()
        best = torch.stack([step.float().topk(2).values for step in output.logits], 1)
        margins = (best[..., 0] - best[..., 1]).tolist()
        counts = [
            ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids) for ids in tokens
        ]
        answers = [ids[:count] for ids, count in zip(tokens, counts, strict=True)]
        yield part, prompts, answers, [row[:count] for row, count in zip(margins, counts, strict=True)]


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], batch: int = 100
) -> dict[str, Any]:
    """Score `rows`; a row is right only if the model gives the answer, the newline and end-of-text by itself."""
    model.eval()
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    margins: list[float] = []
    lengths: list[int] = []
    for part, prompts, answers, sure in greedy_answers(model, tokenizer, rows, batch):
        lengths += map(len, prompts)
        for row, ids, own in zip(part, answers, sure, strict=True):
            margins += own
            text = tokenizer.decode(ids)
            total[row["kind"]] += 1
            right[row["kind"]] += text == f" {row['answer']}\n{tokenizer.eos_token}"
    near = sum(margin < NEAR_TIE for margin in margins)
    return {
        "exact_match": sum(right.values()) / len(rows),
        "exact_match_by_kind": {kind: round(right[kind] / total[kind], 4) for kind in sorted(total)},
        "generated_tokens": len(margins),
        "near_tie_tokens": near,
        "near_tie_share": near / len(margins),
        "smallest_margins": sorted(round(margin, 3) for margin in margins)[:5],
        "prompt_tokens": {"min": min(lengths), "mean": sum(lengths) / len(lengths), "max": max(lengths)},
    }


def without_feature(family: str, directory: Path) -> tuple[str, PreTrainedModel]:
    """The checkpoint with its family's own feature switched off.

    An implementation that forgets the feature must not pass, so the score without it has to be clearly worse.
    """
    config = AutoConfig.from_pretrained(directory)
    if family in ("llama", "deepseek_v2"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    elif family == "mistral":
        config.sliding_window = None
    elif family == "deepseek_v3":
        config.rope_interleave = False
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.bfloat16)
    if family == "qwen2":
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()
    elif family == "qwen3":
        for layer in model.model.layers:
            layer.self_attn.q_norm = torch.nn.Identity()
            layer.self_attn.k_norm = torch.nn.Identity()
    elif family == "qwen3_moe":
        for index, layer in enumerate(model.model.layers):
            if index not in config.mlp_only_layers:
                layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.roll(1, 0)
    elif family == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)
    elif family == "glm4_moe":
        for layer in model.model.layers[config.first_k_dense_replace :]:
            layer.mlp.shared_experts.down_proj.weight.data.zero_()
    return FEATURES[family], model
