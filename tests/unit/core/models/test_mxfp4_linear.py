"""Whole models of AMD Quark's MXFP4 checkpoints: their logits are those of what the checkpoint stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atom_core.kernels.mxfp4_linear.reference import round_groups
from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    Family,
    distance,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4
from tests.unit.core.ranks import tensor_parallel_logits

TOKENS = random_tokens(24)
#: Whole groups where a matrix's inputs are shared by two ranks.
SIZES = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4}
MIXTURES = (
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    Family("MixtralForCausalLM", "mixtral", {"num_local_experts": 4}),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
)
QWEN3, QWEN3_MOE = FAMILIES[3], MIXTURES[0]
WEIGHTS_ALONE = quark_mxfp4(rounded_inputs=False)
every_family = pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES], ids=str)
either = pytest.mark.parametrize("family", [QWEN3, QWEN3_MOE], ids=str)


def make(folder: Path, family: Family = QWEN3, config: dict | None = None, keep=lambda module: False, **settings):
    make_model(folder / "source", make_config(family, **{**SIZES, **settings}))
    make_quark(folder / "source", folder / "packed", config, keep=keep)
    return folder / "packed"


@every_family
def test_weights_alone_are_what_the_checkpoint_stands_for(tmp_path, family):
    folder = make(tmp_path, family, WEIGHTS_ALONE)
    make_plain_quark(folder, tmp_path / "plain")
    found, expected = Runner(folder).logits(TOKENS), Runner(tmp_path / "plain").logits(TOKENS)
    assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_rounded_activations_are_hugging_faces_behind_the_same_rounding(tmp_path, family):
    folder = make(tmp_path, family)
    make_plain_quark(folder, tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, attn_implementation="eager")
    plain = logits(theirs, TOKENS)
    for name, module in theirs.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given: (round_groups(given[0]),))
    runner = Runner(folder)
    found, expected = runner.logits(TOKENS), logits(theirs, TOKENS)
    # Where float32 sums in another order move a number over a tie, four bits make more of it, from that token on.
    errors = (found - expected).abs().amax(-1) / (expected.max() - expected.min())
    assert errors.median() <= LOGITS_TOLERANCE
    assert distance(found, plain) > 1e-2
    assert {choice.op for choice in runner.runtime.kernels.choices()} >= {"mxfp4_linear", "linear"}


@pytest.mark.parametrize("rounded", [False, True])
def test_experts_round_their_inputs_where_linear_layers_do(tmp_path, rounded):
    runner = Runner(make(tmp_path, QWEN3_MOE, quark_mxfp4(rounded)))
    layer = runner.model.model.layers[1]
    specs = (layer.self_attn.qkv_proj.method.spec, layer.mlp.experts.method.kernel.spec)
    assert [spec.rounded_inputs for spec in specs] == [rounded, rounded]
    assert "mxfp4_experts" in {choice.op for choice in runner.runtime.kernels.choices()}


def test_weights_stay_packed(tmp_path):
    layer = Runner(make(tmp_path, QWEN3_MOE)).model.model.layers[1]
    large = [*layer.self_attn.qkv_proj.parameters(), *layer.mlp.experts.parameters()]
    assert {it.dtype for it in large} == {torch.uint8}
    numbers = 96 * (4 + 2 * 2) * 32 + 4 * 3 * 64 * 96
    assert sum(it.nbytes for it in large) == numbers * 17 // 32


@either
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_them_answer_as_one(tmp_path, family, expert_parallel):
    folder = make(tmp_path, family, WEIGHTS_ALONE)
    runner = Runner(folder)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, folder, TOKENS, 2, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


def test_decoding_goes_on_as_the_prompt_began(tmp_path):
    runner = Runner(make(tmp_path))
    (generated,) = runner.generate([TOKENS], 8)
    again = runner.logits([*TOKENS, *generated])[len(TOKENS) - 1 : -1].argmax(-1).tolist()
    assert again == generated


def check(folder: Path, tensor_parallel_size: int, expert_parallel: bool = False) -> None:
    hf = json.loads((folder / "config.json").read_text())
    check_files(read_model_config(hf), folder, tensor_parallel_size, read_quantization(hf), expert_parallel)


def test_ranks_that_would_cut_a_group_are_refused_before_anything_is_loaded(tmp_path):
    folder = make(tmp_path, intermediate_size=96)
    check(folder, 1)
    says = "size 2 would cut MXFP4 groups of model.layers.0.mlp.down_proj: a rank would hold 48 of its 96 columns"
    with pytest.raises(ValueError, match=says):
        check(folder, 2)


def test_experts_that_would_be_cut_may_be_shared_out_whole(tmp_path):
    folder = make(tmp_path, QWEN3_MOE, moe_intermediate_size=32)
    says = r"groups of model.layers.0.mlp.experts.down_proj: .* 16 of its 32 columns.*\(1\), or share out whole experts"
    with pytest.raises(ValueError, match=says):
        check(folder, 2)
    check(folder, 2, expert_parallel=True)


def test_modules_that_the_checkpoint_leaves_out_stay_as_they_are(tmp_path):
    config = quark_mxfp4(exclude=["lm_head", "re:.*self_attn.*", "model.layers.1.mlp*"])
    folder = make(tmp_path, QWEN3_MOE, config, keep=lambda module: "self_attn" in module or ".1.mlp." in module)
    first, second, *_ = Runner(folder).model.model.layers
    assert first.self_attn.qkv_proj.weight.dtype == torch.float32
    assert first.mlp.experts.gate_up_proj_blocks.dtype == torch.uint8
    assert second.mlp.experts.gate_up_proj.dtype == torch.float32


def test_gpt_oss_is_refused(tmp_path):
    family = Family("GptOssForCausalLM", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2})
    make_model(tmp_path / "source", make_config(family, **SIZES))
    make_quark(tmp_path / "source", tmp_path / "packed")
    says = r"experts of model.layers.0.mlp.experts are all in one tensor .* Supported: .* quant_method mxfp4"
    with pytest.raises(ValueError, match=says):
        check(tmp_path / "packed", 1)


NAME = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{NAME}.weight_scale": None}, rf"missing \(1\): {NAME}.weight_scale"),
        ({f"{NAME}.input_scale": torch.ones(())}, rf"unexpected \(1\): {NAME}.input_scale in"),
        ({f"{NAME}.weight": torch.ones(64, 96)}, rf"{NAME}.weight in .* is \[64, 96\], should be \[64, 48\]"),
        (
            {f"{NAME}.weight_scale": torch.full((64, 3), 255, dtype=torch.uint8)},
            rf"{NAME}.weight_scale holds a scale of more than 2\^65",
        ),
    ],
    ids=["no scale", "a scale of inputs", "not packed", "NaN"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, says):
    folder = make(tmp_path, QWEN3_MOE)
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ValueError, match=says):
        Runner(folder)
