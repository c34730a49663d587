"""GPT-OSS against Hugging Face, whole and on several ranks: sinks, windows, biases, and experts in fused tensors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner
from benchmarks import CHECKPOINTS
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    MAX_POSITION,
    Family,
    bfloat16_distances,
    distance,
    greedy,
    load_trained,
    logits,
    logits_token_by_token,
    make_config,
    make_model,
    old_form,
    random_tokens,
)
from tests.unit.core.ranks import data_parallel_logits, tensor_parallel_logits

NAME = "GptOssForCausalLM"
FAMILY = Family(
    NAME,
    "gpt_oss",
    {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "sliding_window": 7},
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
TOKENS = random_tokens(40)


def make(directory, rope=YARN, **settings):
    """With experts that answer so loudly that clamping shows."""
    model = make_model(directory, make_config(FAMILY, rope, **settings))
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj.data.mul_(3)
        experts.gate_up_proj_bias.data.normal_()
        experts.down_proj_bias.data.normal_()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope": {**YARN, "truncate": True}},
        {"rope": {"rope_type": "default"}},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 6},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"layer_types": ["full_attention"] * 3},
        {"attention_bias": False},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_logits_are_hugging_faces(tmp_path, settings):
    model = make(tmp_path, **settings)
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


def test_logits_of_the_trained_checkpoint_are_hugging_faces():
    model, tokens = load_trained(CHECKPOINTS / "gpt_oss")
    assert len(tokens) > model.config.rope_parameters["original_max_position_embeddings"]
    assert len(tokens) > model.config.sliding_window
    assert distance(Runner(CHECKPOINTS / "gpt_oss").logits(tokens), logits(model, tokens)) <= LOGITS_TOLERANCE


def test_the_experts_of_these_tests_are_clamped(tmp_path):
    experts = make(tmp_path).model.layers[1].mlp.experts
    seen = []
    experts._apply_gate, gate = lambda x: seen.append(x.abs().max()) or gate(x), experts._apply_gate
    x = torch.randn(4, 96)
    experts(x, torch.tensor([[0, 1, 2]] * 4), torch.ones(4, 3))
    assert max(seen) > 7


def test_logits_token_by_token_are_hugging_faces(tmp_path):
    model = make(tmp_path)
    runner = Runner(tmp_path)
    caches, rows = runner.caches(1), []
    for index, token in enumerate(TOKENS):
        with torch.inference_mode():
            rows.append(runner.model.logits(runner.step(caches, [index], [[token]]))[0])
    assert distance(torch.stack(rows), logits_token_by_token(model, TOKENS)) <= LOGITS_TOLERANCE


def test_greedy_tokens_are_hugging_faces_in_a_batch_of_prompts(tmp_path):
    model = make(tmp_path)
    prompts = [TOKENS[:20], TOKENS[3:4], TOKENS[5:21]]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    assert Runner(tmp_path, max_model_len=MAX_POSITION).generate(prompts, 20) == expected


def test_bfloat16_is_as_near_to_the_truth_as_hugging_face(tmp_path):
    model = make(tmp_path)
    ours, theirs = bfloat16_distances(model, Runner(tmp_path, dtype=torch.bfloat16).logits)
    assert ours <= 2.0 * theirs


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_them_answer_as_one(tmp_path, world_size, expert_parallel):
    make(tmp_path, num_key_value_heads=4, num_local_experts=8)
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, tmp_path, TOKENS, world_size, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


#: Of data-parallel ranks, which have requests of different lengths at the same time.
PROMPTS = [TOKENS[:21], TOKENS[4:5]]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_data_parallel_ranks_that_share_them_answer_as_one(tmp_path, tensor_parallel_size, expert_parallel):
    make(tmp_path, num_key_value_heads=4, num_local_experts=8)
    runner = Runner(tmp_path)
    expected = [runner.logits(prompt) for prompt in PROMPTS]
    found = data_parallel_logits(runner, tmp_path, PROMPTS, tensor_parallel_size, expert_parallel)
    assert all(distance(ours, one) <= LOGITS_TOLERANCE for ours, one in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias"])
def test_a_missing_tensor_is_named(tmp_path, name):
    make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.{name}"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"missing \(1\): model.layers.1.{name}"):
        Runner(tmp_path)


def test_experts_of_another_size_are_refused(tmp_path):
    make(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.2.mlp.experts.gate_up_proj"
    save_file({**load_file(file), name: torch.zeros(6, 80, 96)}, file)
    with pytest.raises(ValueError, match=rf"{name} .*is \[6, 80, 96\], should be \[6, 96, 80\]"):
        Runner(tmp_path)


def test_keys_that_a_configuration_lacks_are_what_hugging_face_takes_them_for():
    lacking = ("rope_theta", "rope_scaling", "sliding_window", "attention_bias", "rms_norm_eps", "head_dim")
    lacking += ("swiglu_alpha", "swiglu_limit")
    values = old_form({**make_config(FAMILY).to_dict(), "architectures": [NAME]})
    config = read_model_config({key: value for key, value in values.items() if key not in lacking})
    rope = config.rope
    assert (rope.rope_type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    mixer = config.layers[0].mixer
    assert (config.rms_norm_eps, mixer.head_dim, mixer.qkv_bias, mixer.out_bias) == (1e-5, 64, True, True)
    assert [layer.mixer.window for layer in config.layers] == [128, None, 128]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok=7 is more than there are experts \(num_local_experts=6\)"),
        ({"swiglu_limit": 9.0}, "swiglu_limit=9.0, which GptOssForCausalLM does not have; supported: 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0, which GptOssForCausalLM does not have; supported: 1.702"),
        ({"sliding_window": None}, "sliding_window is null, but layer_types names layers of sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers=3"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types has .*'chunked_attention'.*; supported"),
    ],
)
def test_impossible_configurations_are_refused(settings, says):
    values = {**make_config(FAMILY).to_dict(), "architectures": [NAME], **settings}
    with pytest.raises(ValueError, match=says):
        read_model_config(values)


def test_experts_are_not_quantised_to_fp8(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=r"The experts of model\.layers\.0\.mlp\.experts are all in one tensor"):
        Runner(tmp_path, quantization="fp8")


def test_experts_that_ranks_cannot_share_are_refused(tmp_path):
    make(tmp_path, num_key_value_heads=4)
    config = read_model_config(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ValueError, match="tensor parallel size 4 does not divide num_experts=6"):
        check_files(config, tmp_path, tensor_parallel_size=4, expert_parallel=True)
