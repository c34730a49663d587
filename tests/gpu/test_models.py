"""Whole models on this GPU, with the kernels that a GPU gets, beside Hugging Face's on the CPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.standalone import Runner
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    bfloat16_distances,
    distance,
    greedy,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.models.test_qwen3_5 import DENSE, MOE, NEXT

GPU = torch.device("cuda")
TOKENS = random_tokens(40)
#: How much farther from the float32 truth our bfloat16 may be than Hugging Face's.
BF16_RATIO = 2.0

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


@every_family
def test_logits_and_greedy_tokens_are_hugging_faces(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path, device=GPU)
    chosen = {choice.op: choice.implementation for choice in runner.runtime.kernels.choices()}
    assert chosen["attention"] == chosen["qk_norm_rope_cache"] == "triton"
    assert distance(runner.logits(TOKENS).cpu(), logits(model, TOKENS)) <= LOGITS_TOLERANCE
    prompts = [TOKENS[:20], TOKENS[3:4], TOKENS[5:21]]
    assert runner.generate(prompts, 20) == [greedy(model, prompt, 20) for prompt in prompts]


@every_family
def test_bfloat16_is_as_near_to_the_truth_as_hugging_face(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    ours, theirs = bfloat16_distances(model, Runner(tmp_path, device=GPU, dtype=torch.bfloat16).logits)
    assert ours <= BF16_RATIO * theirs


@pytest.mark.parametrize("family", [NEXT, DENSE, MOE], ids=str)
def test_hybrids_have_hugging_faces_logits_and_greedy_tokens(tmp_path, family):
    model, tokens = make_model(tmp_path, make_config(family)), random_tokens(200)
    runner = Runner(tmp_path, device=GPU, max_model_len=256)
    chosen = {choice.op: choice.implementation for choice in runner.runtime.kernels.choices()}
    assert {chosen[op] for op in ("gated_delta_net", "output_gate")} == {"triton"}
    for count in (1, 3, 64, 65, 200):
        assert distance(runner.logits(tokens[:count]).cpu(), logits(model, tokens[:count])) <= LOGITS_TOLERANCE
    prompts = [tokens[:130], tokens[3:4], tokens[5:21]]
    assert runner.generate(prompts, 20) == [greedy(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("family", [NEXT, DENSE, MOE], ids=str)
def test_hybrids_in_bfloat16_are_as_near_to_the_truth_as_hugging_face(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path, device=GPU, dtype=torch.bfloat16, max_model_len=256)
    ours, theirs = bfloat16_distances(model, runner.logits)
    assert ours <= BF16_RATIO * theirs
