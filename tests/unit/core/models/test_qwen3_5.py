"""Qwen3.5 and Qwen3-Next against Hugging Face: hybrids of linear attention (Gated DeltaNet) and full attention."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config

from atom_core.cache import StateView
from atom_core.config import AttentionConfig, GatedDeltaNetConfig
from atom_core.language_model import of_text
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8, make_plain, widen
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    Family,
    bfloat16_distances,
    distance,
    greedy,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.ranks import tensor_parallel_logits

HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,  # with twice as much, float32 itself is 1e-4 of the spread away from float64
}
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MROPE = {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
NEXT = Family("Qwen3NextForCausalLM", "qwen3_next", {**HYBRID, **MIXTURE, "rope_parameters": PARTIAL})
DENSE = Family("Qwen3_5ForCausalLM", "qwen3_5_text", {**HYBRID, "rope_parameters": MROPE})
MOE = Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {**HYBRID, **MIXTURE, "rope_parameters": MROPE})
TOKENS = random_tokens(200)
every_family = pytest.mark.parametrize("family", [NEXT, DENSE, MOE], ids=str)


@every_family
@pytest.mark.parametrize("count", [1, 2, 3, 5, 63, 64, 65, 128, 200])
def test_logits_are_hugging_faces(tmp_path, family, count):
    model = make_model(tmp_path, make_config(family))
    assert distance(Runner(tmp_path).logits(TOKENS[:count]), logits(model, TOKENS[:count])) <= LOGITS_TOLERANCE


@every_family
@pytest.mark.parametrize("count", [1000, 4096])
def test_long_prompts_in_odd_chunks_have_the_logits_of_hugging_face(tmp_path, family, count):
    model, tokens = make_model(tmp_path, make_config(family)), random_tokens(count)
    runner, chance, done, found = Runner(tmp_path), random.Random(count), 0, []
    caches = runner.caches(1)
    while done < count:
        chunk = tokens[done : done + chance.choice((1, 63, 64, 65, 200, 511))]
        found.append(runner.step(caches, [done], [chunk]))
        done += len(chunk)
    with torch.inference_mode():
        ours = runner.model.logits(torch.cat(found))
    assert distance(ours, logits(model, tokens)) <= LOGITS_TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        {"linear_num_value_heads": 4},
        {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
        {"linear_conv_kernel_dim": 2},
        {"linear_key_head_dim": 32, "linear_value_head_dim": 16},
        {"attention_bias": True},
        {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 1.0}},
        {"tie_word_embeddings": True},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", [NEXT, DENSE], ids=str)
def test_settings_mean_what_they_mean_to_hugging_face(tmp_path, family, settings):
    model = make_model(tmp_path, make_config(family, **settings))
    assert distance(Runner(tmp_path).logits(TOKENS[:80]), logits(model, TOKENS[:80])) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("settings", [{"norm_topk_prob": False}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_settings_of_mixtures_mean_what_they_mean_to_hugging_face(tmp_path, settings):
    model = make_model(tmp_path, make_config(NEXT, **settings))
    assert distance(Runner(tmp_path).logits(TOKENS[:20]), logits(model, TOKENS[:20])) <= LOGITS_TOLERANCE


@every_family
def test_greedy_tokens_are_hugging_faces_in_a_batch_of_prompts(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    prompts = [TOKENS[:70], TOKENS[3:4], TOKENS[5:21], TOKENS[10:12]]
    assert Runner(tmp_path).generate(prompts, 12) == [greedy(model, prompt, 12) for prompt in prompts]


def name_of(chunks):
    return f"{len(chunks)} of 1" if set(chunks) == {1} else str(chunks)


@every_family
@pytest.mark.parametrize("chunks", [(1,) * 7, (1,) * 70, (3, 4), (64, 1, 63, 2), (65, 70), (1, 130)], ids=name_of)
def test_prompts_in_chunks_end_in_the_same_states_as_at_once(tmp_path, family, chunks):
    make_model(tmp_path, make_config(family))
    runner, total = Runner(tmp_path), sum(chunks)
    whole, parts = runner.caches(1), runner.caches(1)
    expected = runner.step(whole, [0], [TOKENS[:total]])
    found, done = [], 0
    for count in chunks:
        found.append(runner.step(parts, [done], [TOKENS[done : done + count]]))
        done += count
    assert distance(torch.cat(found), expected) <= LOGITS_TOLERANCE
    for index, cache in whole.items():
        if isinstance(cache, StateView):
            for ours, truth in zip(parts[index].tensors, cache.tensors, strict=True):
                assert distance(ours[1], truth[1]) <= LOGITS_TOLERANCE
                assert ours[0].isnan().all(), "slot 0 belongs to no request"


@every_family
def test_modules_by_themselves_answer_as_fused_ones(tmp_path, family):
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS[:70])
    runner.model.model.layers[2].register_forward_hook(lambda *args: None)
    assert distance(runner.logits(TOKENS[:70]), expected) <= LOGITS_TOLERANCE


@every_family
def test_bfloat16_is_as_near_to_the_truth_as_hugging_face(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    ours, theirs = bfloat16_distances(model, Runner(tmp_path, dtype=torch.bfloat16).logits)
    assert ours <= 2.0 * theirs


@every_family
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_heads_by_key_head(tmp_path, family, world_size):
    make_model(tmp_path, make_config(family, num_key_value_heads=4))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS[:70])
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS[:70], world_size):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@every_family
def test_norms_of_zeros_multiply_by_one(tmp_path, family):
    make_model(tmp_path, make_config(family))
    runner = Runner(tmp_path, dtype=torch.bfloat16)
    norm = runner.model.model.layers[0].input_layernorm
    assert norm.gain.dtype == torch.float32
    assert norm.weight.abs().max() < 0.9
    assert (norm.gain == 1 + norm.weight.float()).all()
    runner.reload(tmp_path)
    assert (norm.gain == 1 + norm.weight.float()).all()


@pytest.mark.parametrize("vision", ["model.visual.", "visual."])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_a_wrapper_is_its_language_model(tmp_path, architecture, prefix, vision):
    """As Transformers and vLLM name a vision-language model: the text's configuration and names are inside."""
    model = make_model(tmp_path, make_config(DENSE))
    text = json.loads((tmp_path / "config.json").read_text())
    whole = Qwen3_5Config(text_config=text, vision_config={"depth": 1}).to_dict()
    whole["architectures"] = [architecture]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file({**tensors, f"{vision}patch_embed.proj.weight": torch.ones(3)}, file)
    assert distance(Runner(tmp_path).logits(TOKENS[:70]), logits(model, TOKENS[:70])) <= LOGITS_TOLERANCE


def test_what_the_configuration_says_is_read():
    config = read_model_config(make_config(NEXT).to_dict())
    kinds = [type(layer.mixer) for layer in config.layers]
    assert kinds == [GatedDeltaNetConfig, AttentionConfig, GatedDeltaNetConfig, GatedDeltaNetConfig]
    assert config.zero_centered_norms
    assert config.has_states
    assert config.layers[1].mixer.output_gate
    assert (config.rope.rotary_dim, config.layers[0].moe.shared_gate) == (8, True)


def test_keys_that_say_what_is_done_anyway_may_be_there():
    values = make_config(MOE).to_dict()
    said = {"norm_topk_prob": True, "decoder_sparse_step": 1, "hidden_act": "swish"}
    assert read_model_config({**values, **said}) == read_model_config({**values, "hidden_act": "swish"})
    with pytest.raises(ValueError, match="norm_topk_prob=False"):
        read_model_config({**values, "norm_topk_prob": False})


def test_a_quantisation_that_is_null_inside_is_the_whole_checkpoints():
    whole, quantization = make_config(DENSE).to_dict(), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = {"text_config": {**whole, "quantization_config": None}, "quantization_config": quantization}
    assert of_text(text)["quantization_config"] == quantization


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no 'full_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers=4"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, r"layer_types has \['mamba'\]; supported"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads=8 is not a multiple of linear_num_key_heads=3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'.*supported: 'silu' or 'swish'"),
        ({"layer_scale": True}, "layer_scale=True"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh' is not supported"),
    ],
    ids=str,
)
@every_family
def test_values_that_are_not_built_are_refused_by_name(family, settings, reason):
    values = {**make_config(family).to_dict(), **settings}
    with pytest.raises(ValueError, match=reason):
        read_model_config(values)


#: As published FP8 checkpoints leave them.
PLAIN = ("in_proj_ba", "in_proj_b", "in_proj_a", "shared_expert_gate", "conv1d")
WHOLE_BLOCKS = {
    "hidden_size": 128,
    "head_dim": 128,
    "num_attention_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "initializer_range": 0.05,  # random states spread what activations of three bits change
}


#: What activations of three bits do to logits, root mean square, as some tokens go to other experts. Other weights
#: would make it 1.4.
ROUNDED = 0.4


def error(found, expected):
    found, expected = found.logits(TOKENS[:70]), expected.logits(TOKENS[:70])
    return ((found - expected).norm() / expected.norm()).item()


def plain_modules():
    """What they leave, by name."""
    names = [f"linear_attn.{name}" for name in PLAIN] + ["mlp.gate", "mlp.shared_expert_gate"]
    return [f"model.layers.{layer}.{name}" for layer in range(4) for name in names]


def whole_blocks(family):
    """Sizes of which blocks of 128 cut nothing."""
    others = ("_expert_", "moe") if family is DENSE else ()
    return {key: size for key, size in WHOLE_BLOCKS.items() if not any(it in key for it in others)}


def make_quantized(folder, family, form, **settings):
    make_model(folder / "source", make_config(family, **{**whole_blocks(family), **settings}))
    key = next((it for it in ("ignore", "exclude") if it in form.config), "modules_to_not_convert")
    config = {**form.config, key: [*form.config.get(key, []), *plain_modules()]}
    make_fp8(folder / "source", folder / "fp8", replace(form, config=config))
    make_plain(folder / "fp8", folder / "plain")
    return Runner(folder / "fp8"), Runner(folder / "plain")


@every_family
@pytest.mark.parametrize("form", [*BLOCK_FORMATS[:2], FORMATS[0], FORMATS[1], FORMATS[5]], ids=str)
def test_fp8_weights_are_those_that_the_checkpoint_stands_for(tmp_path, family, form):
    quantized, plain = make_quantized(tmp_path, family, form)
    for index, layer in enumerate(quantized.model.model.layers):
        if "linear_attn" in dict(layer.named_children()):
            truth = plain.model.model.layers[index].linear_attn
            ours = layer.linear_attn
            assert ours.in_proj.quantized
            assert not ours.in_proj_ba.quantized
            x = torch.eye(128)
            rows = len(ours.in_proj.weight)
            scales = ours.in_proj.weight_scale
            wide = widen(scales, ours.in_proj.weight.shape) if form.block else scales[:, None]
            torch.testing.assert_close(ours.in_proj.weight.float() * wide, truth.in_proj(x).T[:rows])
            torch.testing.assert_close(ours.in_proj_ba(x), truth.in_proj(x)[:, rows:])
    assert 1e-3 < error(quantized, plain) <= ROUNDED


@pytest.mark.parametrize("family", [NEXT, DENSE], ids=str)
def test_a_checkpoint_is_quantised_while_it_is_loaded(tmp_path, family):
    make_model(tmp_path, make_config(family, initializer_range=0.05))
    found, plain = Runner(tmp_path, quantization="fp8"), Runner(tmp_path)
    assert found.model.model.layers[0].linear_attn.in_proj.quantized
    assert 1e-3 < error(found, plain) <= ROUNDED


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_modules_left_out_go_by_the_names_of_the_whole_checkpoint(prefix):
    left_out = [f"{prefix}layers.0.linear_attn.in_proj_b", "model.visual"]
    blocks = {**BLOCK_FORMATS[0].config, "modules_to_not_convert": left_out}
    whole = {**Qwen3_5Config().to_dict(), "quantization_config": blocks}
    quant = read_quantization(whole)
    assert quant.linear(["model.layers.0.linear_attn.in_proj_b"]) is None
    assert quant.linear(["model.layers.10.linear_attn.in_proj_b"]) is not None
    assert quant.linear(["model.layers.0.linear_attn.in_proj_z"]) is not None
    inside = {**whole["text_config"], "quantization_config": blocks}
    assert read_quantization({**whole, "quantization_config": None, "text_config": inside}) == quant


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"head_dim": 64}, r"self_attn.q_proj has parts of 64 rows, .*Supported: parts of a multiple of 128"),
        ({"linear_key_head_dim": 64}, r"linear_attn.in_proj_qkvz has parts of 64 rows"),
    ],
)
def test_parts_within_a_block_of_scales_are_refused_by_name(tmp_path, settings, reason):
    with pytest.raises(ValueError, match=reason):
        make_quantized(tmp_path, NEXT, BLOCK_FORMATS[0], **settings)
