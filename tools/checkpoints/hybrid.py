"""What hybrids of Gated DeltaNet and attention need beside others: in training, in their config, in their scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from task import reply
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

#: Tokens that the attention of most training rows sees: what stands before them, only the states can tell.
WINDOW = 64
#: Tokens of a chunk of the delta rule.
CHUNK = 64
#: What Transformers calls the rule that it has for rows.
RULE = "torch_chunk_gated_delta_rule"
#: The logarithm of a decay that leaves nothing.
LOST = -50.0
#: Where the recurrent states are dropped, by the length of a prompt.
DROPPED: Mapping[str, Callable[[int], list[int]]] = {
    "states across chunks of 64 tokens": lambda length: list(range(64, length, 64)),
    "states from before the last 200 tokens": lambda length: [length - 200] if length > 200 else [],
}


def seen_by_attention(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Bool ``[rows, 1, length, length]``: what a position attends to, the last 64 tokens in three rows of four.

    Without that, the full-attention layer finds what was said early by itself, and the states learn to keep nothing.
    """
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position
    causal = distance >= 0
    near = causal & (distance < WINDOW)
    kinds = torch.stack([causal, near, near, near]).unsqueeze(1)
    return kinds[torch.arange(rows, device=device) % len(kinds)]


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: object
) -> tuple[torch.Tensor, None]:
    """The gated delta rule of whole rows, from no state, as Transformers' own with fewer kernels.

    What a chunk of 64 tokens does to the state, ``S -> M S + N``, is known for all chunks at once, so that one product
    a chunk is left to take one after the other. Chunks are as in arXiv 2412.06464, section 3.3.

    Args:
        query, key: ``[B, T, H, K]``, neither normed nor scaled; ``T`` is a multiple of 64.
        value: ``[B, T, H, V]``.
        g, beta: ``[B, T, H]``; the logarithm of the decay, and how much of a value is written.
    """
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, decay, write = (
            x.transpose(1, 2).float().unflatten(2, (-1, CHUNK)) for x in (query, key, value, g, beta.unsqueeze(-1))
        )
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        total = decay.cumsum(-1)
        since, left = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
        # Only differences that are not positive are exponentiated: the others may overflow.
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        wanted = write * torch.cat([v, since * k], -1)
        added = torch.linalg.solve_triangular(
            (write * (k @ k.mT) * between).tril(-1), wanted, upper=False, unitriangular=True
        )
        fresh, stale = added.split([v.shape[-1], k.shape[-1]], -1)
        moved = (left * k).mT
        kept = torch.diag_embed(total[..., -1:].exp().expand(*total.shape[:-1], k.shape[-1])) - moved @ stale
        states = [v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])]
        for keep, write_too in zip(kept.unbind(2), (moved @ fresh).unbind(2), strict=True):
            states.append(keep @ states[-1] + write_too)
        before = torch.stack(states[:-1], 2)
        q = q * q.shape[-1] ** -0.5
        outputs = (since * q) @ before + ((q @ k.mT) * between) @ (fresh - stale @ before)
    return outputs.flatten(2, 3).transpose(1, 2).to(value.dtype), None


@contextmanager
def rule_of(model: PreTrainedModel, rule: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> Iterator[None]:
    """Has the model's linear layers use this rule where Transformers would use fla's, were it installed."""
    module = vars(sys.modules[type(model).__module__])
    own = module[RULE]
    module[RULE] = rule
    try:
        yield
    finally:
        module[RULE] = own


@torch.no_grad()
def long_memory(model: PreTrainedModel) -> None:
    """Gates under which a new model's states last for 10 to 1,000 tokens, and convolutions that let through.

    Transformers' own forget within two tokens, and from there a state does not learn to keep anything. The steps are
    those of Mamba, from 0.001 to 0.1 (arXiv 2312.00752, section 3.6), each with a rate of 1.
    """
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            steps = torch.logspace(-3, -1, len(module.dt_bias))
            module.dt_bias.copy_(torch.log(torch.expm1(steps)))
            module.A_log.zero_()
        elif isinstance(module, nn.Conv1d):
            module.reset_parameters()


def as_published(file: Path) -> None:
    """Give a saved `config.json` the key that published ones have beside `rope_parameters`, and SGLang reads."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def without_states(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Mapping[str, list[dict[str, str]]]
) -> dict[str, dict[str, float]]:
    """Exact match by what is dropped and by the kind of prompt."""
    return {
        what: {name: sum(_right(model, tokenizer, rows, cuts)) / len(rows) for name, rows in prompts.items()}
        for what, cuts in DROPPED.items()
    }


@torch.inference_mode()
def _right(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    cuts: Callable[[int], list[int]],
    batch: int = 50,
) -> Iterator[bool]:
    """Whether each token of each answer is the most probable one, where the prompt's states are lost at the cuts."""
    own = vars(sys.modules[type(model).__module__])[RULE]
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in part]
        answers = [[*tokenizer(reply(row["answer"]))["input_ids"], tokenizer.eos_token_id] for row in part]
        whole = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        # What is behind a row's end is seen by no position of the row.
        tokens = nn.utils.rnn.pad_sequence(whole, batch_first=True).to(model.device)
        lost = torch.zeros_like(tokens, dtype=torch.bool)
        for row, prompt in zip(lost, prompts, strict=True):
            row[cuts(len(prompt))] = True

        def forgetting(*args: torch.Tensor, g: torch.Tensor, lost: torch.Tensor = lost, **others: Any) -> Any:
            return own(*args, g=g.masked_fill(lost.unsqueeze(-1), LOST), **others)

        with rule_of(model, forgetting):
            best = model(input_ids=tokens, use_cache=False).logits.argmax(-1).tolist()
        for prompt, answer, given in zip(prompts, answers, best, strict=True):
            begin = len(prompt) - 1
            yield given[begin : begin + len(answer)] == answer
