"""The rope table: Hugging Face's frequencies, partial heads, and what a configuration may not say."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atom_core.rope import ROPE_TYPES, RopeConfig, cos_sin_table, inverse_frequencies, read_rope
from tests.unit.core.hugging_face import FAMILIES, make_config, rope_variants

HEAD_DIM = 40
#: Frequencies in float32: the order of two multiplications may differ.
FREQUENCY_TOLERANCE = 1e-6


def read(rope, **settings):
    return read_rope({"rope_parameters": rope, **settings}, head_dim=HEAD_DIM, max_position=64)


def scaled(rope_dim):
    return {name: rope for name, rope in rope_variants(rope_dim).items() if rope["rope_type"] != "default"}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("variant", scaled(HEAD_DIM))
def test_frequencies_are_hugging_faces_also_for_a_part_of_the_head(variant, partial):
    rope = {
        "rope_theta": 5000.0,
        "partial_rotary_factor": partial,
        **scaled(int(HEAD_DIM * partial))[variant],
    }
    config = make_config(FAMILIES[0], rope, head_dim=HEAD_DIM)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=48)
    ours = read(rope)
    assert ours.rotary_dim == HEAD_DIM * partial
    assert ours.attention_factor == pytest.approx(factor, rel=FREQUENCY_TOLERANCE)
    torch.testing.assert_close(inverse_frequencies(ours, 48), expected, rtol=FREQUENCY_TOLERANCE, atol=0)


@pytest.mark.parametrize("variant", rope_variants(HEAD_DIM))
def test_a_table_holds_cosines_then_sines_times_the_attention_factor(variant):
    rope = read({"rope_theta": 10000.0, **rope_variants(HEAD_DIM)[variant]})
    table = cos_sin_table(rope, 48)
    assert table.shape == (48, HEAD_DIM)
    assert table.dtype == torch.float32
    cos, sin = (table / rope.attention_factor).chunk(2, -1)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))
    assert (cos[0] - 1).abs().max() < 1e-6


def test_the_table_of_a_longer_context_begins_with_that_of_a_shorter_one():
    # A position's rotation may not depend on the request that it is in; longrope alone asks what will be served.
    for name, rope in rope_variants(HEAD_DIM).items():
        if "longrope" not in name:
            config = read({"rope_theta": 10000.0, **rope})
            assert torch.equal(cos_sin_table(config, 100)[:70], cos_sin_table(config, 70))


def test_dynamic_is_plain_within_the_trained_length_and_slower_beyond():
    dynamic = read({"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0})
    plain = read({"rope_theta": 10000.0})
    assert torch.equal(cos_sin_table(dynamic, 64), cos_sin_table(plain, 64))
    beyond, before = cos_sin_table(dynamic, 128), cos_sin_table(plain, 128)
    torch.testing.assert_close(beyond[:64], before[:64])
    last_pair = HEAD_DIM - 1  # the sine of the slowest pair, which has not turned far
    assert (beyond[70:, last_pair] < before[70:, last_pair]).all()


def test_a_default_device_does_not_change_where_the_table_is_made():
    with torch.device("meta"):
        table = cos_sin_table(read({}), 8, torch.device("cpu"))
    assert torch.equal(table, cos_sin_table(read({}), 8))


@pytest.mark.parametrize(
    "parameters",
    [{}, {"rope_type": None}, {"rope_type": "default"}, {"type": "default"}, {"factor": None}],
    ids=str,
)
def test_without_a_type_rope_is_plain(parameters):
    assert read(parameters) == RopeConfig("default", 10000.0, HEAD_DIM, 64)


def test_theta_is_found_in_either_place():
    assert read({"rope_theta": 5.0}).theta == 5.0
    assert read({}, rope_theta=7.0).theta == 7.0
    assert read_rope({"rope_theta": 7.0, "rope_scaling": None}, head_dim=8, max_position=64).theta == 7.0


def test_su_is_an_older_name_of_longrope_and_type_of_rope_type():
    factors = {"short_factor": [1.0] * 20, "long_factor": [2.0] * 20, "original_max_position_embeddings": 32}
    new = read({"rope_type": "longrope", **factors})
    old = read_rope({"rope_scaling": {"type": "su", **factors}}, head_dim=HEAD_DIM, max_position=64)
    assert new == old


def test_longrope_finds_the_original_length_beside_rope_scaling():
    factors = {"type": "longrope", "short_factor": [1.0] * 20, "long_factor": [2.0] * 20}
    inside = read_rope(
        {"rope_scaling": {**factors, "original_max_position_embeddings": 16}}, head_dim=HEAD_DIM, max_position=64
    )
    beside = read_rope(
        {"rope_scaling": factors, "original_max_position_embeddings": 16}, head_dim=HEAD_DIM, max_position=64
    )
    assert inside == beside
    assert inside.factor == 4.0


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    assert read({"rope_type": "yarn", "original_max_position_embeddings": 16}).factor == 4.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, f"rope type 'spiral' is not supported; supported: {', '.join(ROPE_TYPES)}"),
        ({"type": "mrope"}, "rope type 'mrope' is not supported"),
        ({"rope_type": "linear"}, "'linear' needs a number 'factor' in rope_parameters; found None"),
        ({"rope_type": "dynamic", "factor": "2"}, "'dynamic' needs a number 'factor' in rope_parameters; found '2'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs a number 'low_freq_factor'"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "'llama3' needs a number 'original_max_position_embeddings'",
        ),
        ({"rope_type": "longrope"}, "needs 20 numbers in 'short_factor' .*found 0"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 20, "long_factor": [1.0] * 3},
            "needs 20 numbers in 'long_factor' .*found 3",
        ),
        ({"partial_rotary_factor": 0.125}, "rotates 5 numbers of a head; rope needs an even count"),
        ({"partial_rotary_factor": 0.01}, "rotates 0 numbers of a head"),
        ({"partial_rotary_factor": 1.5}, "rotates 60 numbers of a head"),
    ],
    ids=str,
)
def test_what_rope_cannot_be_is_an_error_that_names_it(parameters, message):
    with pytest.raises(ValueError, match=message):
        read(parameters)
