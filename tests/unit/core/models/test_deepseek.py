"""DeepSeek V2 and V3 against Hugging Face: whole, in chunks and on several ranks, latents expanded and absorbed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner
from benchmarks import CHECKPOINTS
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8, make_plain
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
from tests.unit.core.models.test_block_fp8 import ExactInputs
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4
from tests.unit.core.ranks import tensor_parallel_logits
from tests.unit.core.real_latents import with_real_latents

SIZES = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", {**SIZES, "topk_method": "group_limited_greedy"})
V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", SIZES)
LITE = {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TOKENS = random_tokens(40)
#: Sums in another order in float32; of the spread of logits.
CLOSE = 2.5e-6
#: No mixtures, where near scores choose other experts for a token.
DENSE = {"first_k_dense_replace": NUM_LAYERS}
#: What numbers of two or three bits after the first do to logits.
ROUNDED = 0.2

both = pytest.mark.parametrize("family", [V2, V3], ids=str)


@pytest.fixture
def absorbed(monkeypatch):
    """No latents are expanded, whatever it costs."""
    monkeypatch.setattr("atom_core.kernels.mla_prefill.plan.expanding_is_cheaper", lambda *sizes: False)


CASES = [
    (V3, {}, None),
    (V3, {"q_lora_rank": None}, None),
    (V3, {"rope_interleave": False}, None),
    (V3, {}, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    (V3, {}, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    (V3, {}, YARN),
    (V3, {"n_group": 1, "topk_group": 1}, None),
    (V3, {"norm_topk_prob": False}, None),
    (V3, {"n_shared_experts": 2, "first_k_dense_replace": 0}, None),
    (V3, {"first_k_dense_replace": 2}, None),
    (V3, {"tie_word_embeddings": True, "qk_nope_head_dim": 16, "v_head_dim": 24}, None),
    (V2, {}, None),
    (V2, LITE, None),
    (V2, LITE, {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
    (V2, {"topk_group": 1, "num_experts_per_tok": 2}, None),
]
every_case = pytest.mark.parametrize(("family", "settings", "rope"), CASES, ids=str)


@every_case
def test_logits_are_hugging_faces(tmp_path, family, settings, rope):
    model = make_model(tmp_path, make_config(family, rope, **settings))
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= CLOSE


@every_case
@pytest.mark.usefixtures("absorbed")
def test_absorbed_logits_are_hugging_faces(tmp_path, family, settings, rope):
    model = make_model(tmp_path, make_config(family, rope, **settings))
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= CLOSE


def test_a_checkpoint_with_real_latents_has_the_same_logits(tmp_path):
    trained = CHECKPOINTS / "deepseek_v3"
    with_real_latents(trained, tmp_path / "real", torch.float32)
    real, small = Runner(tmp_path / "real"), Runner(trained)
    assert (real.config.layers[0].mixer.rank, small.config.layers[0].mixer.rank) == (512, 64)
    tokens = [token % small.config.vocab_size for token in TOKENS]
    assert distance(real.logits(tokens), small.logits(tokens)) <= CLOSE


@both
def test_greedy_tokens_are_hugging_faces_in_a_batch_of_prompts(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    prompts = [TOKENS[:20], TOKENS[3:4], TOKENS[5:21]]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    assert Runner(tmp_path, max_model_len=MAX_POSITION).generate(prompts, 20) == expected


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("chunk", [1, 7, 39])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(tmp_path, page_size, chunk):
    make_model(tmp_path, make_config(V3))
    runner = Runner(tmp_path, page_size=page_size)
    caches = runner.caches(1)
    with torch.inference_mode():
        chunks = [
            runner.model.logits(runner.step(caches, [begin], [TOKENS[begin : begin + chunk]]))
            for begin in range(0, len(TOKENS), chunk)
        ]
    assert distance(torch.cat(chunks), runner.logits(TOKENS)) <= CLOSE


@both
def test_bfloat16_is_as_near_to_the_truth_as_hugging_face(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    ours, theirs = bfloat16_distances(model, Runner(tmp_path, dtype=torch.bfloat16).logits)
    assert ours <= 2.0 * theirs


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
def test_a_cache_in_fp8_changes_little(tmp_path, cache_dtype):
    model = make_model(tmp_path, make_config(V3, **DENSE))
    found = Runner(tmp_path, cache_dtype=cache_dtype).logits(TOKENS)
    assert 1e-4 < distance(found, logits(model, TOKENS)) <= ROUNDED


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("family", "settings"), [(V3, {}), (V2, LITE)], ids=str)
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_the_heads_answer_as_one(tmp_path, family, settings, world_size, expert_parallel):
    make_model(tmp_path, make_config(family, **settings))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, tmp_path, TOKENS, world_size, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


#: Whole blocks of 128 for each of two ranks.
BLOCKS = {
    "hidden_size": 200,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 130,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
#: Sizes of what is in groups of 32 numbers.
GROUPED = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
every_form = pytest.mark.parametrize("form", [*BLOCK_FORMATS, FORMATS[0], FORMATS[1], FORMATS[5]], ids=str)


def make_quantized(folder, form, **settings):
    make_model(folder / "source", make_config(V3, **{**BLOCKS, **settings}))
    make_fp8(folder / "source", folder / "fp8", form)
    return folder / "fp8"


@pytest.mark.parametrize("form", BLOCK_FORMATS, ids=str)
def test_fp8_weights_are_those_that_the_checkpoint_stands_for(tmp_path, monkeypatch, form):
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", ExactInputs)
    folder = make_quantized(tmp_path, form, **DENSE)
    make_plain(folder, tmp_path / "plain")
    runner, expected = Runner(folder), Runner(tmp_path / "plain").logits(TOKENS)
    assert distance(runner.logits(TOKENS), expected) <= LOGITS_TOLERANCE
    for found in tensor_parallel_logits(runner, folder, TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@every_form
def test_what_is_folded_into_queries_is_scaled_back_and_the_fp8_is_freed(tmp_path, form):
    folder = make_quantized(tmp_path, form, **DENSE)
    make_plain(folder, tmp_path / "plain")
    found, expected = (Runner(it).model.model.layers[1].self_attn.kv_b_proj for it in (folder, tmp_path / "plain"))
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-6, atol=1e-6)
    assert found.stored.numel() == 0
    found.finalize_weights()
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-6, atol=1e-6)


def test_mxfp4_weights_are_those_that_the_checkpoint_stands_for(tmp_path):
    make_model(tmp_path / "source", make_config(V3, **{**BLOCKS, **dict.fromkeys(GROUPED, 128)}))
    make_quark(tmp_path / "source", tmp_path / "packed", quark_mxfp4(rounded_inputs=False))
    make_plain_quark(tmp_path / "packed", tmp_path / "plain")
    runner, expected = Runner(tmp_path / "packed"), Runner(tmp_path / "plain").logits(TOKENS)
    assert runner.model.model.layers[1].self_attn.kv_b_proj.stored.numel() == 0
    assert distance(runner.logits(TOKENS), expected) <= LOGITS_TOLERANCE
    for found in tensor_parallel_logits(runner, tmp_path / "packed", TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


def test_fp8_made_while_loading_leaves_alone_what_is_folded_into_queries(tmp_path):
    make_model(tmp_path, make_config(V3, **DENSE))
    plain, made = Runner(tmp_path), Runner(tmp_path, quantization="fp8")
    attention = made.model.model.layers[0].self_attn
    assert torch.equal(attention.kv_b_proj.weight, plain.model.model.layers[0].self_attn.kv_b_proj.weight)
    assert attention.o_proj.quantized
    assert distance(made.logits(TOKENS), plain.logits(TOKENS)) <= ROUNDED


def test_ranks_that_would_cut_a_block_of_what_is_folded_are_refused(tmp_path):
    folder = make_quantized(tmp_path, BLOCK_FORMATS[0], **DENSE, v_head_dim=48, qk_nope_head_dim=32)
    with pytest.raises(ValueError, match=r"kv_b_proj: a rank would hold 320 of its 640 rows"):
        tensor_parallel_logits(Runner(folder), folder, TOKENS, 2)


def test_layers_that_draft_are_left_out(tmp_path):
    model = make_model(tmp_path, make_config(V3))
    file = tmp_path / "model.safetensors"
    drafting = {f"model.layers.{NUM_LAYERS}.{name}.weight": torch.ones(96) for name in ("enorm", "shared_head.norm")}
    save_file({**load_file(file), **drafting}, file)
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= CLOSE
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=rf"unexpected \(2\): model.layers.{NUM_LAYERS}.enorm.weight"):
        Runner(tmp_path)


def values_of(family, **settings):
    values = {**make_config(family).to_dict(), "architectures": [family.architecture], **settings}
    return {key: value for key, value in values.items() if value is not ...}


def test_keys_that_a_configuration_lacks_are_what_hugging_face_takes_them_for():
    lacking = dict.fromkeys(
        ("topk_method", "norm_topk_prob", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"), ...
    )
    second, third = (read_model_config(old_form(values_of(family, **lacking))) for family in (V2, V3))
    assert [layer.moe is None for layer in second.layers] == [False] * 3
    assert [layer.moe is None for layer in third.layers] == [True] * 3
    moe = second.layers[0].moe
    assert (moe.routing.scoring, moe.routing.num_groups, moe.routing.renormalize) == ("softmax", 1, False)
    assert (moe.shared_size, second.draft_layers, third.draft_layers) == (80, 0, 1)
    routing = read_model_config(values_of(V3, topk_method=...)).layers[1].moe.routing
    assert (routing.scoring, routing.correction, routing.group_score) == ("sigmoid", True, "two largest")


def test_queries_are_compressed_unless_a_configuration_says_null():
    assert read_model_config(values_of(V3, q_lora_rank=...)).layers[0].mixer.query_rank == 1536
    assert read_model_config(values_of(V3, q_lora_rank=None)).layers[0].mixer.query_rank is None


def test_some_layers_may_have_no_mixture():
    config = read_model_config(values_of(V2, moe_layer_freq=2, first_k_dense_replace=0))
    assert [layer.moe is None for layer in config.layers] == [False, True, False]


def test_a_token_takes_a_latent_and_a_rotated_key_of_the_cache():
    mixer = read_model_config(values_of(V3)).layers[0].mixer
    assert (mixer.cached_elements, mixer.query_dim) == (32, 20)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        (V2, {"topk_method": "best"}, "topk_method='best' is not supported; supported: 'greedy', 'group_limited_gre"),
        (V3, {"scoring_func": "relu"}, "scoring_func='relu' is not supported for DeepseekV3.*; supported: 'sigmoid'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=true with topk_method='group_limited_greedy' is not supported"),
        (
            V3,
            {"attention_bias": True},
            "attention_bias=True, which DeepseekV3ForCausalLM does not have; supported: False",
        ),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank=0; a positive integer"),
        (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 with partial_rotary_factor=1.0 rotates 7 elements"),
        (V3, {"n_group": 3}, "n_group=3 does not divide the number of experts, n_routed_experts=8"),
        (V3, {"rope_parameters": {**YARN, "factor": None, "mscale_all_dim": 1.0}}, "mscale_all_dim=1.0 in rope_param"),
    ],
)
def test_impossible_configurations_are_refused(family, settings, says):
    with pytest.raises(ValueError, match=says):
        read_model_config(values_of(family, **settings))


def test_ranks_that_cannot_share_the_heads_are_refused():
    with pytest.raises(ValueError, match="tensor parallel size 3 does not divide num_attention_heads=4"):
        check_files(read_model_config(values_of(V3)), None, tensor_parallel_size=3)
