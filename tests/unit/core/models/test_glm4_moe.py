"""GLM4-MoE against Hugging Face, whole and on several ranks: groups of experts, a shared one, and drafts left out."""

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
    NUM_LAYERS,
    Family,
    bfloat16_distances,
    distance,
    greedy,
    logits,
    make_config,
    make_model,
    old_form,
    random_tokens,
)
from tests.unit.core.ranks import data_parallel_logits, tensor_parallel_logits

NAME = "Glm4MoeForCausalLM"
FAMILY = Family(
    NAME,
    "glm4_moe",
    {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
    },
)
TOKENS = random_tokens(40)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_group": 1, "topk_group": 1},
        {"topk_group": 4},
        {"num_experts_per_tok": 1},
        {"norm_topk_prob": False},
        {"n_shared_experts": 2},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 2},
        {"use_qk_norm": True},
        {"attention_bias": True},
        {"partial_rotary_factor": 0.3},
        {"partial_rotary_factor": 1.0},
        {"hidden_act": "gelu"},
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_routers_and_their_corrections_are_in_float32(tmp_path, dtype):
    make_model(tmp_path, make_config(FAMILY))
    gate = Runner(tmp_path, dtype=dtype).model.model.layers[1].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_them_answer_as_one(tmp_path, world_size, expert_parallel):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4, n_shared_experts=2))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, tmp_path, TOKENS, world_size, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


#: Of data-parallel ranks, which have requests of different lengths at the same time.
PROMPTS = [TOKENS[:21], TOKENS[4:5]]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_data_parallel_ranks_that_share_them_answer_as_one(tmp_path, tensor_parallel_size, expert_parallel):
    make_model(tmp_path, make_config(FAMILY, num_key_value_heads=4, n_shared_experts=2))
    runner = Runner(tmp_path)
    expected = [runner.logits(prompt) for prompt in PROMPTS]
    found = data_parallel_logits(runner, tmp_path, PROMPTS, tensor_parallel_size, expert_parallel)
    assert all(distance(ours, one) <= LOGITS_TOLERANCE for ours, one in zip(found, expected, strict=True))


def test_layers_that_draft_are_left_out(tmp_path):
    model = make_model(tmp_path, make_config(FAMILY))
    file = tmp_path / "model.safetensors"
    drafting = {f"model.layers.{NUM_LAYERS}.{name}.weight": torch.ones(96) for name in ("enorm", "shared_head.norm")}
    save_file({**load_file(file), **drafting}, file)
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=rf"unexpected \(2\): model.layers.{NUM_LAYERS}.enorm.weight"):
        Runner(tmp_path)


def test_a_missing_correction_is_named(tmp_path):
    make_model(tmp_path, make_config(FAMILY))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"missing \(1\): {name}"):
        Runner(tmp_path)


def test_keys_that_a_configuration_lacks_are_what_hugging_face_takes_them_for():
    lacking = ("partial_rotary_factor", "rms_norm_eps", "n_group", "topk_group", "n_shared_experts", "norm_topk_prob")
    values = old_form({**make_config(FAMILY).to_dict(), "architectures": [NAME]})
    config = read_model_config({key: value for key, value in values.items() if key not in lacking})
    found = config.layers[1].moe
    assert (config.rope.rotary_dim, config.rms_norm_eps, config.draft_layers) == (10, 1e-5, 1)
    assert (found.routing.num_groups, found.routing.top_groups, found.shared_size) == (1, 1, 40)
    assert found.routing.renormalize


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is more than there are experts \(n_routed_experts=8\)"),
        ({"n_group": 3}, "n_group=3 does not divide the number of experts, n_routed_experts=8"),
        ({"topk_group": 5}, r"topk_group=5 is more than there are groups of experts \(n_group=4\)"),
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok=5 is more than .* topk_group=2 of n_group=4 groups of n_routed_experts=8: 4",
        ),
        ({"n_shared_experts": 0}, "n_shared_experts=0; a positive integer"),
    ],
)
def test_impossible_configurations_are_refused(settings, says):
    values = {**make_config(FAMILY).to_dict(), "architectures": [NAME], **settings}
    with pytest.raises(ValueError, match=says):
        read_model_config(values)


def test_a_shared_expert_that_ranks_cannot_share_is_refused():
    settings = {"num_key_value_heads": 4, "moe_intermediate_size": 42}
    config = read_model_config({**make_config(FAMILY, **settings).to_dict(), "architectures": [NAME]})
    says = r"tensor parallel size 4 does not divide n_shared_experts \* moe_intermediate_size=42"
    with pytest.raises(ValueError, match=says):
        check_files(config, None, tensor_parallel_size=4, expert_parallel=True)
