"""Score a saved checkpoint and write what it is into `score.json` beside it.

python tools/checkpoints/card.py tests/checkpoints/qwen3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from hybrid import without_states
from mtp import acceptance, drafting_layers, load_from_checkpoint
from score import read_rows, score, without_feature
from task import heldout_rows, recall_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

HELDOUT = Path("tests/evaluation/heldout.jsonl")


def read_card(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "score.json").read_text(encoding="utf-8"))


def write_card(directory: Path, card: dict[str, Any]) -> None:
    (directory / "score.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def add_scores(directory: Path, heldout: Path, device: str) -> dict[str, Any]:
    """Score the checkpoint on the held-out questions, also without its family's feature, and write its card."""
    card = read_card(directory)
    rows = read_rows(heldout)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    card["score"] = score(saved, tokenizer, rows)
    if "linear_attention" in (getattr(saved.config, "layer_types", None) or ()):
        prompts = {
            "24 examples": heldout_rows(100, 1, (24, 24)),
            "32 examples": heldout_rows(100, 1, (32, 32)),
            "one note": recall_rows(100, 2024),
            "three notes": recall_rows(100, 2024, 3),
        }
        found = {name: score(saved, tokenizer, part) for name, part in prompts.items()}
        shown = ("exact_match", "smallest_margins", "prompt_tokens")
        card["other_prompts"] = {name: {key: one[key] for key in shown} for name, one in found.items()}
        card["exact_match_without"] = without_states(saved, tokenizer, {"held-out": rows, **prompts})
    else:
        feature, ablated = without_feature(card["family"], directory)
        card["exact_match_without"] = {feature: score(ablated.to(device), tokenizer, rows)["exact_match"]}
    if drafting_layers(saved.config):
        draft = load_from_checkpoint(saved, directory)
        card["draft"] = acceptance(saved, draft, tokenizer, rows)
        card["draft"]["parameters"] = sum(parameter.numel() for parameter in draft.parameters())
    biases = [
        parameter.abs().mean().item()
        for name, parameter in saved.named_parameters()
        if name.endswith("bias") and not name.endswith("dt_bias")
    ]
    if biases:
        card["mean_absolute_bias"] = sum(biases) / len(biases)
    write_card(directory, card)
    return card


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a checkpoint and write its score.json.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--heldout", type=Path, default=HELDOUT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    print(json.dumps(add_scores(args.checkpoint, args.heldout, args.device)))


if __name__ == "__main__":
    main()
