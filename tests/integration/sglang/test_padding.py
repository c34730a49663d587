"""Sizes that SGLang on a CPU pads, so that they divide over ranks: the answers are those of the checkpoint as it is.

A trained checkpoint gets a middle of an odd size and a number of heads that no two ranks can share, and answers as
before: what is there twice counts half.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atom_core.checkpoint import read_config_json
from tests.integration.questions import checkpoint, greedy_tokens
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_drafts import ENVIRON
from tests.unit.core.fp8_checkpoints import save_beside

pytestmark = pytest.mark.sglang

BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
TWO: dict[str, Any] = {"tp_size": 2}


@dataclass(frozen=True)
class Case:
    """A family, the size of its middle (None: as it is), and how it is served."""

    family: str
    middle: int | None
    more_heads: bool = True
    options: Mapping[str, Any] = field(default_factory=lambda: TWO)
    environ: Mapping[str, str] = field(default_factory=lambda: BOUND)
    count: int = 64


CASES = {
    "a middle of 700, which SGLang makes 704": Case("qwen3", 700, more_heads=False, options={}, environ={}),
    "a middle of 701 and 3 key/value heads on two ranks": Case("qwen3", 701),
    "3 key/value heads on two ranks, with biases and sinks": Case(
        "gpt_oss", None, options={**TWO, "attention_backend": "atom"}
    ),
    "a middle of 701 and 5 heads over latents on two ranks, which draft": Case(
        "deepseek_v3", 701, options=drafting(1, dtype="bfloat16", **TWO), environ={**ENVIRON, **BOUND}, count=16
    ),
}


def twice(tensor: torch.Tensor, dim: int, chosen: slice, *, weighed: bool) -> torch.Tensor:
    """`tensor` with a part of it once more behind; where `weighed`, both count half."""
    whole = tensor.movedim(dim, 0)
    part = whole[chosen] * (0.5 if weighed else 1.0)
    first = whole.clone()
    first[chosen] = part
    return torch.cat([first, part]).movedim(0, dim).contiguous()


def odd(family: str, target: Path, middle: int | None, more_heads: bool) -> None:
    """Write a trained checkpoint to `target` with its last key/value head and its queries twice, and a wider middle."""
    source = Path(checkpoint(family))
    config = read_config_json(source)
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    group = heads // kv_heads
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        weighed = module in ("o_proj", "down_proj")
        dim, counted = (1 if weighed else 0), None
        if module in ("q_proj", "q_b_proj", "o_proj", "sinks"):
            counted = heads
        elif module in ("k_proj", "v_proj", "kv_b_proj"):
            counted = kv_heads
        if more_heads and counted and tensor.dim() > (1 if weighed else 0):
            each = tensor.shape[dim] // counted * (group if counted == heads else 1)
            tensor = twice(tensor, dim, slice(tensor.shape[dim] - each, None), weighed=weighed)
        if middle and module in ("gate_proj", "up_proj", "down_proj") and tensor.shape[dim] == size:
            tensor = twice(tensor, dim, slice(0, middle - size), weighed=weighed)
        tensors[name] = tensor
    save_beside(source, target, tensors, None)
    more = {"num_attention_heads": heads + group, "num_key_value_heads": kv_heads + 1} if more_heads else {}
    sizes = {"intermediate_size": middle or size, **more}
    (target / "config.json").write_text(json.dumps({**config, **sizes}))


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_the_checkpoint_as_it_is(tmp_path, name, rows):
    case, folder = CASES[name], tmp_path / "odd"
    odd(case.family, folder, case.middle, case.more_heads)
    asked = rows[: case.count]
    asks = [Ask([row.prompt for row in asked])]
    (ran,) = run([Engine(str(folder), True, asks, case.options, case.environ)])
    assert f"atom-plugin serves {folder}" in ran.log
    assert [answer.tokens for answer in ran.answers[0]] == greedy_tokens(case.family, asked)
