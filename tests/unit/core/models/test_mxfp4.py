"""GPT-OSS with experts in MXFP4: they stay packed, and answer as the numbers that they stand for."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from benchmarks import CHECKPOINTS
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    Family,
    distance,
    load_trained,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.mxfp4_checkpoints import CONFIG, make_gpt_oss, make_plain_gpt_oss
from tests.unit.core.ranks import tensor_parallel_logits

NAME = "GptOssForCausalLM"
FAMILY = Family(
    NAME,
    "gpt_oss",
    {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128, "num_key_value_heads": 4},
)
TOKENS = random_tokens(40)
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def checkpoints(tmp_path):
    """The packed one, and one of the numbers that it stands for."""
    make_model(tmp_path, make_config(FAMILY))
    packed, rounded = tmp_path / "packed", tmp_path / "rounded"
    make_gpt_oss(tmp_path, packed)
    make_plain_gpt_oss(tmp_path, rounded)
    return packed, rounded


def change(directory, **tensors):
    file = directory / "model.safetensors"
    save_file({**load_file(file), **{f"{EXPERTS}.{name}": tensor for name, tensor in tensors.items()}}, file)


def test_logits_are_hugging_faces_of_the_numbers(checkpoints):
    from transformers import AutoModelForCausalLM

    packed, rounded = checkpoints
    model = AutoModelForCausalLM.from_pretrained(rounded, attn_implementation="eager", dtype=torch.float32)
    assert distance(Runner(packed).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


def test_logits_of_a_trained_copy_are_hugging_faces_of_the_numbers(tmp_path):
    make_gpt_oss(CHECKPOINTS / "gpt_oss", tmp_path / "packed")
    make_plain_gpt_oss(CHECKPOINTS / "gpt_oss", tmp_path / "rounded")
    model, tokens = load_trained(tmp_path / "rounded")
    assert distance(Runner(tmp_path / "packed").logits(tokens), logits(model, tokens)) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_logit_is_that_of_an_unquantised_checkpoint(checkpoints, dtype):
    found, expected = (Runner(folder, dtype=dtype).logits(TOKENS) for folder in checkpoints)
    assert torch.equal(found, expected)


def test_experts_stay_packed(checkpoints):
    experts = Runner(checkpoints[0]).model.model.layers[1].mlp.experts
    large = {name: it for name, it in experts.named_parameters() if not name.endswith("bias")}
    assert {it.dtype for it in large.values()} == {torch.uint8}
    assert sum(it.nbytes for it in large.values()) == 8 * 3 * 128 * 96 * 17 // 32


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_them_answer_as_one(checkpoints, world_size, expert_parallel):
    runner = Runner(checkpoints[0])
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, checkpoints[0], TOKENS, world_size, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


def test_groups_that_ranks_would_split_are_refused(checkpoints):
    values = {**json.loads((checkpoints[0] / "config.json").read_text()), "intermediate_size": 96}
    config, quant = read_model_config(values), read_quantization(values)
    says = (
        r"tensor parallel size 2 would cut MXFP4 groups of model.layers.0.mlp.experts.down_proj: a rank would hold 48 "
        r"of its 96 columns.*whole groups \(1\), or share out whole experts"
    )
    with pytest.raises(ValueError, match=says):
        check_files(config, None, tensor_parallel_size=2, quant=quant)
    check_files(config, None, tensor_parallel_size=2, quant=quant, expert_parallel=True)


@pytest.mark.parametrize(("name", "matrix"), [("hidden_size", "gate_up_proj"), ("intermediate_size", "down_proj")])
def test_sizes_that_do_not_divide_into_groups_are_refused(checkpoints, name, matrix):
    values = {**json.loads((checkpoints[0] / "config.json").read_text()), name: 80}
    with pytest.raises(ValueError, match=f"mlp.experts.{matrix} has 80 columns, which is no multiple of 32"):
        check_files(read_model_config(values), None, quant=read_quantization(values))


def test_scales_that_are_no_numbers_are_refused(checkpoints):
    change(checkpoints[0], down_proj_scales=torch.full((8, 96, 4), 255, dtype=torch.uint8))
    with pytest.raises(ValueError, match=rf"{EXPERTS}.down_proj_scales holds a scale of more than 2\^65"):
        Runner(checkpoints[0])


def test_scales_of_another_dtype_are_refused(checkpoints):
    change(checkpoints[0], down_proj_scales=torch.ones(8, 96, 4))
    says = rf"{EXPERTS}.down_proj_scales .*is stored as F32, but config.json says MXFP4 \(U8\)"
    with pytest.raises(ValueError, match=says):
        Runner(checkpoints[0])


def test_a_checkpoint_whose_config_says_nothing_of_mxfp4_is_refused(checkpoints):
    path = checkpoints[0] / "config.json"
    values = json.loads(path.read_text())
    del values["quantization_config"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"missing \(6\): model.layers.0.mlp.experts.down_proj"):
        Runner(checkpoints[0])


def test_other_models_in_mxfp4_are_refused():
    says = r"'mxfp4' with model_type 'llama' \(only gpt_oss\) is not supported"
    with pytest.raises(ValueError, match=says):
        read_quantization({"model_type": "llama", "quantization_config": CONFIG})


@pytest.mark.parametrize(
    "pattern", ["model.layers.0.mlp", "model.layers.1.mlp.experts", r"re:.*layers\.[1-9]\.mlp\.", "experts.down_proj"]
)
def test_experts_that_are_left_out_are_refused(checkpoints, pattern):
    path = checkpoints[0] / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"]["modules_to_not_convert"] = ["model.layers.*.self_attn", pattern]
    path.write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match=rf"modules_to_not_convert .*{re.escape(pattern)[:12]}.*, which leaves experts"
    ):
        Runner(checkpoints[0])
