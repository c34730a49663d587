"""Shared experts among the routed ones answer as the network apart that checkpoints have, in every format."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.kernels import kernel_set, select
from atom_core.kernels.shared_experts import SHARED_EXPERTS, SharedExpertsSpec
from atom_core.runtime import SingleDataParallelRank
from atom_core.standalone import Runner, finalize
from atom_core.weights import load_weights
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8, make_plain
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    Family,
    distance,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.models.test_fp8_experts import ExactExperts, ExactLinear
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4
from tests.unit.core.ranks import build, data_parallel_logits, tensor_parallel_logits

GLM4 = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1},
)
MLA = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
DEEPSEEK = {**GLM4.settings, **MLA, "head_dim": 8, "num_key_value_heads": 4, "routed_scaling_factor": 1.7}
V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", {**DEEPSEEK, "topk_method": "greedy"})
V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", {**DEEPSEEK, "n_group": 2, "topk_group": 1})
#: Whole blocks of 128 for each of two ranks, and a smaller last block of hidden numbers.
BLOCKS = {"hidden_size": 200, "head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
TOKENS = random_tokens(24)
every_family = pytest.mark.parametrize("family", [GLM4, V2, V3], ids=str)
every_count = pytest.mark.parametrize("count", [1, 2, 3])
every_format = pytest.mark.parametrize("form", [*FORMATS, *BLOCK_FORMATS], ids=str)


@pytest.fixture
def routed(monkeypatch):
    """They are among the routed ones wherever they can be, as on a GPU."""
    monkeypatch.setitem(select.PRIORITY, "cpu", ("framework", "torch", "widened", "reference", "routed", "separate"))


@pytest.fixture
def exact_inputs(monkeypatch):
    """No activation is quantised: the answers must be those of the weights."""
    monkeypatch.setattr("atom_core.kernels.fp8_linear.ReferenceFp8Linear", ExactLinear)
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", ExactLinear)
    monkeypatch.setattr("atom_core.kernels.fp8_experts.ReferenceFp8Experts", ExactExperts)


def mixture(runner):
    return runner.model.model.layers[1].mlp


def choice(runner):
    return next(it for it in runner.runtime.kernels.choices() if it.op == "shared_experts")


@every_family
@every_count
@pytest.mark.parametrize("apart", [False, True], ids=["routed", "apart"])
def test_logits_are_hugging_faces(tmp_path, family, count, apart):
    model = make_model(tmp_path, make_config(family, n_shared_experts=count))
    runner = Runner(tmp_path, kernels={"shared_experts": "separate" if apart else "routed"})
    assert distance(runner.logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE
    layer = mixture(runner)
    assert (layer.shared_experts is None) == (not apart)
    assert len(layer.experts.gate_up_proj) == 4 + (0 if apart else count)
    assert layer.experts.method.kernel.spec.top_k == 2 + (0 if apart else count)
    assert choice(runner).forced


def test_on_a_cpu_they_are_apart(tmp_path):
    make_model(tmp_path, make_config(V3, n_shared_experts=1))
    assert choice(Runner(tmp_path)).implementation == "separate"


@every_count
@pytest.mark.usefixtures("routed")
def test_tensor_and_data_parallel_ranks_that_share_them_answer_as_one(tmp_path, count):
    make_model(tmp_path, make_config(GLM4, num_key_value_heads=4, n_shared_experts=count))
    runner = Runner(tmp_path)
    assert mixture(runner).shared_experts is None
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE
    prompts = [TOKENS[:9], TOKENS[4:5]]
    for found, prompt in zip(data_parallel_logits(runner, tmp_path, prompts, 2, False), prompts, strict=True):
        assert distance(found, runner.logits(prompt)) <= LOGITS_TOLERANCE


@pytest.mark.usefixtures("routed")
def test_ranks_that_share_out_whole_experts_have_them_apart(tmp_path):
    make_model(tmp_path, make_config(GLM4, num_key_value_heads=4))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, 2, expert_parallel=True):
        assert distance(found, expected) <= LOGITS_TOLERANCE
    apart = build(runner, tmp_path, expert_parallel=True)
    assert apart.model.layers[1].mlp.shared_experts is not None
    forced = runner.runtime.kernels
    forced = select.KernelSet(forced.target, forced.ops, {"shared_experts": "routed"})
    with pytest.raises(ValueError, match=r"shared_experts=routed, which cannot run on cpu.*: With expert parallelism"):
        build(runner, tmp_path, expert_parallel=True, data_parallel=SingleDataParallelRank(), kernels=forced)


@every_format
@pytest.mark.usefixtures("routed", "exact_inputs")
def test_fp8_weights_are_those_that_the_checkpoint_stands_for(tmp_path, form):
    make_model(tmp_path / "source", make_config(GLM4, **BLOCKS, n_shared_experts=2))
    make_fp8(tmp_path / "source", tmp_path / "fp8", form)
    make_plain(tmp_path / "fp8", tmp_path / "plain")
    runner, expected = Runner(tmp_path / "fp8"), Runner(tmp_path / "plain").logits(TOKENS)
    assert mixture(runner).shared_experts is None
    assert mixture(runner).experts.gate_up_proj.dtype == torch.float8_e4m3fn
    assert distance(runner.logits(TOKENS), expected) <= LOGITS_TOLERANCE
    for found in tensor_parallel_logits(runner, tmp_path / "fp8", TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.usefixtures("exact_inputs")
def test_fp8_made_while_loading_has_the_scales_of_the_network_apart(tmp_path):
    make_model(tmp_path, make_config(GLM4, n_shared_experts=2))
    found, expected = (
        Runner(tmp_path, quantization="fp8", kernels={"shared_experts": how}).logits(TOKENS)
        for how in ("routed", "separate")
    )
    assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.usefixtures("routed")
def test_mxfp4_weights_are_those_that_the_checkpoint_stands_for(tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32}
    make_model(tmp_path / "source", make_config(GLM4, **sizes, n_shared_experts=2))
    make_quark(tmp_path / "source", tmp_path / "packed", quark_mxfp4(rounded_inputs=False))
    make_plain_quark(tmp_path / "packed", tmp_path / "plain")
    runner, expected = Runner(tmp_path / "packed"), Runner(tmp_path / "plain").logits(TOKENS)
    assert mixture(runner).shared_experts is None
    assert distance(runner.logits(TOKENS), expected) <= LOGITS_TOLERANCE
    for found in tensor_parallel_logits(runner, tmp_path / "packed", TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("name", ["down_proj", "gate_proj|up_proj"])
def test_they_stay_apart_where_the_checkpoint_keeps_them_in_another_format(tmp_path, name):
    sizes = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32}
    kept = tuple(f"shared_experts.{it}" for it in name.split("|"))
    excluded = quark_mxfp4(rounded_inputs=False, exclude=["lm_head", *(f"*{it}" for it in kept)])
    make_model(tmp_path / "source", make_config(GLM4, **sizes))
    make_quark(tmp_path / "source", tmp_path / "packed", excluded, keep=lambda module: module.endswith(kept))
    make_plain_quark(tmp_path / "packed", tmp_path / "plain")
    runner, expected = Runner(tmp_path / "packed"), Runner(tmp_path / "plain").logits(TOKENS)
    assert distance(runner.logits(TOKENS), expected) <= LOGITS_TOLERANCE
    assert mixture(runner).shared_experts is not None
    assert choice(runner).passed_over == (
        ("routed", "The checkpoint keeps them in another format than the routed experts."),
    )


@pytest.mark.usefixtures("routed")
def test_weights_that_are_loaded_again_are_the_new_ones(tmp_path):
    model = make_model(tmp_path, make_config(V3, n_shared_experts=2))
    runner = Runner(tmp_path)
    names = load_weights(
        runner.model, [(name, 0.5 * it) for name, it in load_file(tmp_path / "model.safetensors").items()]
    )
    assert names == set(dict(runner.model.named_parameters()))
    finalize(runner.model)
    for parameter in (*model.parameters(), *model.buffers()):
        if parameter.is_floating_point():
            parameter.data.mul_(0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(2.0)
    assert distance(runner.logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("damage", ["missing", "misshapen", "dtype"])
def test_what_does_not_fit_is_named_once(tmp_path, damage):
    make_model(tmp_path, make_config(V3, n_shared_experts=2))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    if damage == "missing":
        del tensors[name]
        says = rf"missing \(1\): {name}"
    elif damage == "misshapen":
        tensors[name] = tensors[name][:64].clone()
        says = rf"misshapen \(1\): {name} .*is \[64, 96\], should be \[128, 96\]"
    else:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        says = rf"misshapen \(1\): {name} .*is stored as F8_E4M3"
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=says):
        Runner(tmp_path)


def test_shared_experts_of_no_whole_number_of_routed_ones_are_a_separate_network():
    kernels = kernel_set(select.Target("cuda", "sm90"))
    assert kernels.select(SHARED_EXPERTS, SharedExpertsSpec(96, 32, True, False)) == 3
    assert kernels.select(SHARED_EXPERTS, SharedExpertsSpec(80, 32, True, False)) == 0
    chosen = {it.implementation: it.passed_over for it in kernels.choices()}
    assert chosen["routed"] == ()
    ((name, reason),) = chosen["separate"]
    assert (name, "size 80 is no multiple" in reason) == ("routed", True)
