"""The layer that DeepSeek-V3, Qwen3-Next and Qwen3.5 checkpoints have behind the last, which drafts the token after the
next (MTP).

At position ``i`` it reads the model's normed hidden state and the embedding of token ``i + 1``, and predicts token
``i + 2`` through the model's own head (DeepSeek-V3, arXiv 2412.19437, section 2.2). In a checkpoint it is layer
``num_hidden_layers``, of Qwen's ``mtp``; its embeddings and head are those of the model and are not written again.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from packing import IGNORE
from safetensors.torch import load_file, save_file
from score import greedy_answers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

#: What Qwen's checkpoints call the layer's own tensors, and DeepSeek's where the names differ from ours.
QWEN = {
    "eh_proj.": "mtp.fc.",
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "norm.": "mtp.norm.",
    "block.": "mtp.layers.0.",
}
DEEPSEEK = {"norm.": "shared_head.norm.", "block.": ""}


class MtpLayer(nn.Module):
    """``eh_proj(enorm(embedding), hnorm(hidden))``, a decoder layer like the last, and a norm before the head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.block = copy.deepcopy(model.model.layers[-1])
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(model.model.norm) for _ in range(3))
        hidden = model.config.hidden_size
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, dtype=model.dtype, device=model.device)
        nn.init.normal_(self.eh_proj.weight, std=model.config.initializer_range)

    def forward(
        self, model: PreTrainedModel, embeddings: torch.Tensor, hidden: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits ``[B, T, V]`` from ``embeddings`` of the tokens behind those of ``hidden``, both ``[B, T, N]``.

        Where ``seen``, bool ``[B, 1, T, T]``, is given, it says what each position attends to.
        """
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        entered = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        rotations = model.model.rotary_emb(entered, positions)
        left = self.block(entered, attention_mask=seen, position_ids=positions, position_embeddings=rotations)
        return model.lm_head(self.norm(left[0] if isinstance(left, tuple) else left))


def loss_of_draft(
    model: PreTrainedModel,
    layer: MtpLayer,
    hidden: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean loss on the token after the next, where the row has one that is trained on."""
    embeddings = model.model.embed_tokens(inputs[:, 1:].long())
    # vLLM leaves the first position's embedding out, SGLang and Transformers do not: half of the rows each.
    kept = torch.ones(embeddings.shape[:2], device=embeddings.device)
    kept[::2, 0] = 0
    near = None if seen is None else seen[..., :-1, :-1]
    logits = layer(model, embeddings * kept.unsqueeze(-1), hidden[:, :-1], near)
    return cross_entropy(logits.float().flatten(0, 1), targets[:, 1:].long().flatten(), ignore_index=IGNORE)


def drafting_layers(config: PreTrainedConfig) -> int:
    """How many such layers the checkpoint has. Configurations of Qwen3-Next do not say that there is one."""
    uncounted = int(config.model_type == "qwen3_next")
    return getattr(config, "num_nextn_predict_layers", uncounted) or getattr(config, "mtp_num_hidden_layers", 0)


def add_to_checkpoint(layer: MtpLayer, directory: Path, config: PreTrainedConfig) -> None:
    """Write the layer into the checkpoint's one file, under the names that its family has."""
    file = directory / "model.safetensors"
    own = {name: value.contiguous() for name, value in _named(layer.state_dict(), config).items()}
    save_file({**load_file(file), **own}, file, metadata={"format": "pt"})


def load_from_checkpoint(model: PreTrainedModel, directory: Path) -> MtpLayer:
    """The layer of a checkpoint that :func:`add_to_checkpoint` wrote, in the dtype and on the device of ``model``."""
    stored = load_file(directory / "model.safetensors")
    layer = MtpLayer(model)
    state = layer.state_dict()
    for name, value in state.items():
        own = _stored_name(name, model.config)
        if name.endswith("experts.gate_up_proj"):
            begin = own.removesuffix("gate_up_proj")
            pairs = [
                (stored[f"{begin}{i}.gate_proj.weight"], stored[f"{begin}{i}.up_proj.weight"])
                for i in range(len(value))
            ]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down_proj"):
            begin = own.removesuffix("down_proj")
            state[name] = torch.stack([stored[f"{begin}{i}.down_proj.weight"] for i in range(len(value))])
        else:
            state[name] = stored[own]
    layer.load_state_dict(state)
    return layer


def _stored_name(name: str, config: PreTrainedConfig) -> str:
    """What a checkpoint calls a tensor of the layer."""
    qwen = config.model_type.startswith("qwen")
    begin = "" if qwen else f"model.layers.{config.num_hidden_layers}."
    for own, stored in (QWEN if qwen else DEEPSEEK).items():
        if name.startswith(own):
            return begin + stored + name.removeprefix(own)
    return begin + name


def _named(state: dict[str, torch.Tensor], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The layer's tensors by the names in a checkpoint; experts one by one."""
    named: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        own = _stored_name(name, config)
        if own.endswith("experts.gate_up_proj"):
            for index, both in enumerate(value):
                gate, up = both.chunk(2)
                begin = f"{own.removesuffix('gate_up_proj')}{index}"
                named |= {f"{begin}.gate_proj.weight": gate.clone(), f"{begin}.up_proj.weight": up.clone()}
        elif own.endswith("experts.down_proj"):
            for index, down in enumerate(value):
                named[f"{own.removesuffix('down_proj')}{index}.down_proj.weight"] = down.clone()
        else:
            named[own] = value
    return named


@torch.inference_mode()
def acceptance(
    model: PreTrainedModel, layer: MtpLayer, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> dict[str, float | int]:
    """How often the model agrees with the layer's draft of one token a step, while it answers ``rows`` greedily.

    The steps are those of a server: a draft that is right gives two tokens, a wrong one gives one.
    """
    model.eval()
    layer.eval()
    drafted = accepted = 0
    for _, prompts, answers, _ in greedy_answers(model, tokenizer, rows):
        whole = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        # What is behind a row's end is seen by no position of the row.
        tokens = nn.utils.rnn.pad_sequence(whole, batch_first=True).to(model.device)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = layer(model, model.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1])
        drafts = logits.argmax(-1).cpu()
        for prompt, answer, draft in zip(prompts, answers, drafts.tolist(), strict=True):
            last = 0  # Of the tokens that are known to be right.
            while last < len(answer) - 1:
                right = draft[len(prompt) - 1 + last] == answer[last + 1]
                drafted, accepted, last = drafted + 1, accepted + right, last + 1 + right
    return {"drafted": drafted, "accepted": accepted, "acceptance": round(accepted / drafted, 4)}
