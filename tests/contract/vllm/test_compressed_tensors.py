"""Which modules a compressed-tensors checkpoint quantises: the library's own answer, for random patterns."""

from __future__ import annotations

import random

import pytest
import torch
from compressed_tensors.utils.match import is_match

from atom_core.quant.scheme import is_target

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate", "mlp.experts.3.down_proj")
] + ["lm_head"]
PATTERNS = [
    *MODULES,
    *(module.rpartition(".")[0] for module in MODULES[:-1]),
    "Linear",
    "Module",
    "LlamaMLP",
    "up_proj",
    "re:.*lm_head",
    "re:lm_head",
    "re:.*mlp.*",
    "re:model\\.layers\\.1\\.",
    "re:up_proj",
    "re:.*gate$",
    "re:.*self_attn\\.(q|k)_proj",
]


@pytest.mark.parametrize("seed", range(5))
def test_targets_and_exceptions_are_the_librarys(seed):
    rng = random.Random(seed)
    linear = torch.nn.Linear(1, 1)
    for _ in range(200):
        targets, ignore = rng.sample(PATTERNS, rng.randint(1, 3)), rng.sample(PATTERNS, rng.randint(0, 4))
        targets, ignore = ([it for it in these if it != "Module"] for these in (targets, ignore))
        for module in MODULES:
            ours = any(is_target(it, module) for it in targets) and not any(is_target(it, module) for it in ignore)
            assert ours == is_match(module, linear, targets, ignore), (module, targets, ignore)
