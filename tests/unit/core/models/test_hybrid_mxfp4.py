"""Qwen3-Next and Qwen3.5 in AMD Quark's MXFP4: their logits are those of what the checkpoint stands for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5MoeConfig

from atom_core.kernels.mxfp4_linear.reference import round_groups
from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import LINEARS
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, distance, logits, make_config, make_model, random_tokens
from tests.unit.core.models.test_qwen3_5 import DENSE, MOE, NEXT, PLAIN
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4
from tests.unit.core.ranks import tensor_parallel_logits
from tests.unit.core.test_spellings import fused, respell

TOKENS = random_tokens(70)
#: Whole groups where two ranks share a matrix's inputs.
SIZES = {"intermediate_size": 128, "linear_value_head_dim": 16}
EXPERT_SIZES = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
#: What stays as it is: a layer's gates and its router.
LEFT_OUT = [*(f"linear_attn.{name}" for name in PLAIN if "in_proj" in name), "mlp.gate", "mlp.shared_expert_gate"]
every_family = pytest.mark.parametrize("family", [NEXT, DENSE, MOE], ids=str)
every_mixture = pytest.mark.parametrize("family", [NEXT, MOE], ids=str)


def left_out(prefix="model."):
    return ["lm_head", *(f"{prefix}layers.{layer}.{name}" for layer in range(4) for name in LEFT_OUT)]


def make(folder, family, rounded_inputs=False, **settings):
    """A packed checkpoint and the one of the numbers that it stands for."""
    sizes = SIZES if family is DENSE else {**SIZES, **EXPERT_SIZES}
    make_model(folder / "source", make_config(family, **{**sizes, **settings}))
    packed, plain = folder / "packed", folder / "plain"
    make_quark(folder / "source", packed, quark_mxfp4(rounded_inputs, exclude=left_out()))
    make_plain_quark(packed, plain)
    return packed, plain


@every_family
def test_weights_alone_are_what_the_checkpoint_stands_for(tmp_path, family):
    packed, plain = map(Runner, make(tmp_path, family))
    assert distance(packed.logits(TOKENS), plain.logits(TOKENS)) <= LOGITS_TOLERANCE
    layer = packed.model.model.layers[0]
    assert layer.linear_attn.in_proj.weight.dtype == layer.linear_attn.out_proj.weight.dtype == torch.uint8
    assert layer.linear_attn.in_proj_ba.weight.dtype == torch.float32
    if family is not DENSE:
        assert layer.mlp.experts.gate_up_proj_blocks.dtype == torch.uint8
        assert layer.mlp.shared_expert.gate_up_proj.weight.dtype == torch.uint8


@pytest.mark.parametrize(("family", "settings"), [(NEXT, {"mlp_only_layers": [0, 1, 2, 3]}), (DENSE, {})], ids=str)
def test_rounded_activations_are_hugging_faces_behind_the_same_rounding(tmp_path, family, settings):
    packed, plain = make(tmp_path, family, rounded_inputs=True, **settings)
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    for name, module in theirs.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            module.register_forward_pre_hook(lambda _, given: (round_groups(given[0]),))
    found, expected = Runner(packed).logits(TOKENS), logits(theirs, TOKENS)
    # Where float32 sums in another order move a number over a tie, four bits make more of it, from that token on.
    errors = (found - expected).abs().amax(-1) / (expected.max() - expected.min())
    assert errors.median() <= LOGITS_TOLERANCE
    assert distance(found, Runner(plain).logits(TOKENS)) > 1e-2


@every_mixture
def test_experts_round_their_inputs_too(tmp_path, family):
    packed, plain = map(Runner, make(tmp_path, family, rounded_inputs=True))
    layer = packed.model.model.layers[0]
    assert layer.linear_attn.in_proj.method.spec.rounded_inputs
    assert layer.mlp.experts.method.kernel.spec.rounded_inputs
    assert distance(packed.logits(TOKENS), plain.logits(TOKENS)) > 1e-2


@every_family
def test_ranks_that_share_them_answer_as_one(tmp_path, family):
    folder, _ = make(tmp_path, family)
    runner = Runner(folder)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, folder, TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@every_mixture
def test_experts_may_be_in_one_tensor_a_matrix(tmp_path, family):
    folder, _ = make(tmp_path, family)
    expected = Runner(folder).logits(TOKENS)
    respell(folder, fused)
    assert torch.equal(Runner(folder).logits(TOKENS), expected)


@pytest.mark.parametrize(("family", "config"), [(DENSE, Qwen3_5Config), (MOE, Qwen3_5MoeConfig)], ids=str)
def test_a_wrapper_is_its_language_model(tmp_path, family, config):
    """Its names, also of what is left out, are those of the whole checkpoint."""
    folder, _ = make(tmp_path, family)
    expected = Runner(folder).logits(TOKENS)
    text = json.loads((folder / "config.json").read_text())
    quantization = {**text.pop("quantization_config"), "exclude": [*left_out("model.language_model."), "model.visual*"]}
    whole = config(text_config=text, vision_config={"depth": 1}).to_dict()
    whole |= {
        "architectures": [family.architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    path = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): it for name, it in load_file(path).items()}
    save_file({**tensors, "model.visual.patch_embed.proj.weight": torch.ones(3)}, path)
    assert torch.equal(Runner(folder).logits(TOKENS), expected)
