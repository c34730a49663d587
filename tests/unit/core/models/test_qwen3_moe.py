"""Qwen3-MoE against Hugging Face, whole and on several ranks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    MAX_POSITION,
    Family,
    bfloat16_distances,
    distance,
    greedy,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.ranks import build, data_parallel_logits, on_ranks, tensor_parallel_logits

NAME = "Qwen3MoeForCausalLM"
FAMILY = Family(
    NAME,
    "qwen3_moe",
    {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
)
TOKENS = random_tokens(40)


def load_config(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 6},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_logits_are_hugging_faces(tmp_path, settings):
    model = make_model(tmp_path, make_config(FAMILY, **settings))
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


def test_greedy_tokens_are_hugging_faces_in_a_batch_of_prompts(tmp_path):
    model = make_model(tmp_path, make_config(FAMILY))
    prompts = [TOKENS[:20], TOKENS[3:4], TOKENS[5:21]]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    assert Runner(tmp_path, max_model_len=MAX_POSITION).generate(prompts, 20) == expected


def test_bfloat16_is_as_near_to_the_truth_as_hugging_face(tmp_path):
    model = make_model(tmp_path, make_config(FAMILY))
    ours, theirs = bfloat16_distances(model, Runner(tmp_path, dtype=torch.bfloat16).logits)
    assert ours <= 2.0 * theirs


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_them_answer_as_one(tmp_path, world_size, expert_parallel):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4, num_experts=8))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, tmp_path, TOKENS, world_size, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


#: Of data-parallel ranks, which have requests of different lengths at the same time.
PROMPTS = [TOKENS[:21], TOKENS[4:5]]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_data_parallel_ranks_that_share_them_answer_as_one(tmp_path, tensor_parallel_size, expert_parallel):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4, num_experts=8))
    runner = Runner(tmp_path)
    expected = [runner.logits(prompt) for prompt in PROMPTS]
    found = data_parallel_logits(runner, tmp_path, PROMPTS, tensor_parallel_size, expert_parallel)
    assert all(distance(ours, one) <= LOGITS_TOLERANCE for ours, one in zip(found, expected, strict=True))


def test_a_rank_holds_its_experts_alone(tmp_path):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4))
    runner = Runner(tmp_path)

    def work(group):
        experts = build(runner, tmp_path, tensor_parallel=group, expert_parallel=True).model.layers[0].mlp.experts
        return experts.local_experts, experts.gate_up_proj.shape, experts.down_proj.shape

    assert on_ranks(2, work) == [(held, (3, 80, 96), (3, 96, 40)) for held in (range(3), range(3, 6))]


def test_experts_that_do_not_divide_among_ranks_are_refused(tmp_path):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4))
    runner = Runner(tmp_path)
    with pytest.raises(ValueError, match="tensor parallel size 4 does not divide num_experts=6"):
        tensor_parallel_logits(runner, tmp_path, TOKENS, 4, expert_parallel=True)


def test_experts_that_ranks_cannot_share_are_refused(tmp_path):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4, moe_intermediate_size=42))
    with pytest.raises(ValueError, match="tensor parallel size 4 does not divide moe_intermediate_size=42"):
        check_files(read_model_config(load_config(tmp_path)), tmp_path, tensor_parallel_size=4)


def test_a_missing_expert_is_named(tmp_path):
    make_model(tmp_path, make_config(FAMILY))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.5.down_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing \(1\): model.layers.1.mlp.experts.5.down_proj.weight"):
        Runner(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than there are experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0; a positive integer"),
    ],
)
def test_impossible_configurations_are_refused(settings, says):
    values = {**make_config(FAMILY).to_dict(), "architectures": [NAME], **settings}
    with pytest.raises(ValueError, match=says):
        read_model_config(values)
