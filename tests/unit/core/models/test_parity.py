"""Our logits and greedy tokens are Hugging Face's, for every family and rope variant."""

from __future__ import annotations

import json

import pytest
import torch

from atom_core.hf_keys import is_neutral
from atom_core.models.registry import load_model_class
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    MAX_POSITION,
    bfloat16_distances,
    distance,
    greedy,
    logits,
    logits_token_by_token,
    make_config,
    make_model,
    old_form,
    random_tokens,
    rope_variants,
)

#: How much farther from the float32 truth our bfloat16 may be than Hugging Face's: both round after every layer, and
#: which of them is luckier is chance.
BF16_RATIO = 2.0

SERVED = 48
"""Longest sequence; two longrope variants lie on either side of it."""
TOKENS = random_tokens(40)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


@every_family
@pytest.mark.parametrize("variant", rope_variants(20))
def test_logits_agree(tmp_path, family, variant):
    model = make_model(tmp_path, make_config(family, rope_variants(20)[variant]))
    assert distance(Runner(tmp_path, max_model_len=SERVED).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


@every_family
@pytest.mark.parametrize("variant", rope_variants(20))
def test_configurations_written_before_rope_parameters_mean_the_same(tmp_path, family, variant):
    model = make_model(tmp_path, make_config(family, rope_variants(20)[variant]))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(old_form(json.loads(path.read_text()))))
    assert distance(Runner(tmp_path, max_model_len=SERVED).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


@every_family
def test_dynamic_rope_beyond_its_length_is_what_hugging_face_decodes(tmp_path, family):
    model = make_model(tmp_path, make_config(family, rope_variants(20)["dynamic"], max_position_embeddings=16))
    found = Runner(tmp_path, max_model_len=SERVED).logits(TOKENS)
    assert distance(found, logits_token_by_token(model, TOKENS)) <= LOGITS_TOLERANCE


@every_family
@pytest.mark.parametrize("head_dim", [2, 20, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
def test_head_counts_and_sizes(tmp_path, family, head_dim, heads, kv_heads):
    config = make_config(family, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads)
    model = make_model(tmp_path, config)
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


@every_family
@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"attention_bias": False, "mlp_bias": False},
        {"rms_norm_eps": 1e-2},
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_to_hugging_face(tmp_path, family, settings):
    model = make_model(tmp_path, make_config(family, **settings))
    if means_more(family, settings):
        with pytest.raises(ValueError, match=rf"The model's config has \w+=.*, to which {family.architecture} gives"):
            Runner(tmp_path)
        return
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


def means_more(family, settings):
    """Whether a setting is one that this family's class leaves aside, and that has a meaning in others."""
    known = load_model_class(family.architecture).schema.model_fields
    return any(key not in known and not is_neutral(key, value) for key, value in settings.items())


@every_family
def test_greedy_tokens_are_equal_in_a_batch_of_prompts(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    prompts = [TOKENS[:20], TOKENS[3:4], TOKENS[5:21]]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    assert Runner(tmp_path, max_model_len=MAX_POSITION).generate(prompts, 20) == expected


@every_family
def test_bfloat16_is_as_near_to_the_truth_as_hugging_face(tmp_path, family):
    model = make_model(tmp_path, make_config(family))
    ours, theirs = bfloat16_distances(model, Runner(tmp_path, dtype=torch.bfloat16).logits)
    assert ours <= BF16_RATIO * theirs
