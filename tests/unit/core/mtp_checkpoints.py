"""Checkpoints with layers that draft (multi-token prediction), made of Hugging Face's, and what these answer."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.unit.core.hugging_face import make_model


@dataclass
class Drafting:
    """What stands around one decoder layer."""

    enorm: nn.Module
    hnorm: nn.Module
    norm: nn.Module
    eh_proj: nn.Linear


class Reference:
    """A model, and behind its ``num_layers`` layers those that draft."""

    def __init__(self, model: Any, num_layers: int, drafting: list[Drafting]) -> None:
        self.model, self.num_layers, self.drafting = model, num_layers, drafting

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The model's hidden states ``[T, hidden]`` after its final norm."""
        self.model.config.num_hidden_layers = self.num_layers
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the model's head."""
        return self.model.lm_head(hidden)

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The model's own ``count`` tokens, without any draft."""
        found: list[int] = []
        for _ in range(count):
            found.append(int(self.logits(self.hidden(tokens + found)[-1]).argmax()))
        return found

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What is drafted behind ``tokens``: by one layer again and again, on its own hidden states after the first."""
        given, ahead = self.hidden(tokens[:-1]), tokens[1:]
        found: list[int] = []
        for _ in range(count):
            left = self.draft(ahead, given)
            found.append(int(self.logits(left[-1]).argmax()))
            given, ahead = torch.cat([given, left[-1:]]), [*ahead, found[-1]]
        return found

    def right_drafts(self, prompt: list[int], answer: list[int], count: int, length: int) -> list[int]:
        """How many tokens of each step's drafts are right, until ``length`` tokens of ``answer`` are known.

        ``answer`` is the model's, longer by ``count`` than ``length``: the last step drafts beyond it.
        """
        right, known = [], 1
        while known < length:
            drafts = self.drafts(prompt + answer[:known], count)
            pairs = zip(drafts, answer[known:], strict=False)
            right.append(next((at for at, (draft, token) in enumerate(pairs) if draft != token), count))
            known += right[-1] + 1
        return right

    @torch.inference_mode()
    def draft(self, tokens: list[int], hidden: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` from ``tokens``, each the one after its position, and ``hidden``."""
        around = self.drafting[depth % len(self.drafting)]
        layer = self.model.model.layers[self.num_layers + depth % len(self.drafting)]
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        entered = around.eh_proj(torch.cat([around.enorm(embedded), around.hnorm(hidden)], -1))[None]
        count = len(tokens)
        positions = torch.arange(count)[None]
        unseen = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotations = self.model.model.rotary_emb(entered, positions)
        left = layer(entered, attention_mask=unseen, position_ids=positions, position_embeddings=rotations)
        return around.norm((left[0] if isinstance(left, tuple) else left)[0])


def make_mtp(directory: Path, config: Any, num_drafts: int = 1, seed: int = 0) -> Reference:
    """A random float32 model of ``config`` with ``num_drafts`` layers that draft, saved to ``directory``."""
    whole, num_layers = copy.deepcopy(config), config.num_hidden_layers
    whole.num_hidden_layers += num_drafts
    return add_drafting(directory, make_model(directory, whole, seed), num_layers)


def make_good_mtp(directory: Path, model: Any, num_layers: int) -> Reference:
    """As :func:`add_drafting`, of random weights with which many drafts are right, and many are not.

    Layers add little, so that the next token follows mostly from the last one, and layers that draft see mostly that.
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in [*tensors.items(), *model.state_dict().items()]:
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            tensor.mul_(0.006)
    save_file(tensors, file, metadata={"format": "pt"})
    return add_drafting(directory, model, num_layers, of_tokens=1.0)


def add_drafting(directory: Path, model: Any, num_layers: int, of_tokens: float = 0.0) -> Reference:
    """Turn what ``model``, saved to ``directory``, has behind ``num_layers`` layers into layers that draft.

    ``of_tokens`` is what is added to the diagonal of the half of ``eh_proj`` that reads the embedding.
    """
    size, drafting, more = model.config.hidden_size, [], {}
    num_drafts = len(model.model.layers) - num_layers
    for index in range(num_layers, num_layers + num_drafts):
        norms = {name: copy.deepcopy(model.model.norm) for name in ("enorm", "hnorm", "shared_head.norm")}
        for norm in norms.values():
            norm.weight.data.add_(torch.randn(size) * 0.1)
        eh_proj = nn.Linear(2 * size, size, bias=False)
        eh_proj.weight.data.normal_(std=0.02 if of_tokens else 0.1)
        eh_proj.weight.data[:, :size].diagonal().add_(of_tokens)
        more |= {f"model.layers.{index}.{name}.weight": norm.weight.data for name, norm in norms.items()}
        more[f"model.layers.{index}.eh_proj.weight"] = eh_proj.weight.data
        drafting.append(Drafting(norms["enorm"], norms["hnorm"], norms["shared_head.norm"], eh_proj))
    file = directory / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), "num_hidden_layers": num_layers}
    path.write_text(json.dumps({**values, "num_nextn_predict_layers": num_drafts}))
    return Reference(model.eval().requires_grad_(False), num_layers, drafting)
