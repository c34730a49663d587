"""The rope table: Hugging Face's frequencies, partial heads, and what a configuration may not say."""

from __future__ import annotations

import copy
import random
from typing import ClassVar

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atom_core.hf_config import HfConfig
from atom_core.models.registry import MODELS, load_model_class
from atom_core.rope import ROPE_TYPES, RopeConfig, cos_sin_table, inverse_frequencies, read_rope
from tests.unit.core.hugging_face import FAMILIES, make_config, rope_variants

HEAD_DIM = 40
#: Frequencies in float32: the order of two multiplications may differ.
FREQUENCY_TOLERANCE = 1e-6


class Partly(HfConfig):
    """A family that may rotate a part of a head."""

    model_types: ClassVar[tuple[str, ...]] = ("any",)
    default_partial: ClassVar[float | None] = 1.0


SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
}


def read_values(head_dim=HEAD_DIM, **settings):
    values = {"architectures": ["Any"], "max_position_embeddings": 64, **SIZES, **settings}
    return read_rope(Partly.read(values), head_dim=head_dim)


def read(rope, **settings):
    return read_values(rope_parameters=rope, **settings)


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
    assert read_values(8, rope_theta=7.0, rope_scaling=None).theta == 7.0


def test_of_both_forms_rope_scaling_counts():
    stretched = {"rope_type": "linear", "factor": 2.0}
    assert read({"rope_theta": 5.0}, rope_scaling=stretched) == read({**stretched, "rope_theta": 10000.0})


@pytest.mark.parametrize("architecture", MODELS)
def test_no_theta_means_that_of_hugging_faces_class(architecture):
    from transformers import CONFIG_MAPPING

    schema = load_model_class(architecture).schema
    theirs = CONFIG_MAPPING[schema.model_types[0]]
    assert schema.default_theta == theirs.default_theta


def test_su_is_an_older_name_of_longrope_and_type_of_rope_type():
    factors = {"short_factor": [1.0] * 20, "long_factor": [2.0] * 20, "original_max_position_embeddings": 32}
    new = read({"rope_type": "longrope", **factors})
    old = read_values(rope_scaling={"type": "su", **factors})
    assert new == old


def test_longrope_finds_the_original_length_beside_rope_scaling():
    factors = {"type": "longrope", "short_factor": [1.0] * 20, "long_factor": [2.0] * 20}
    inside = read_values(rope_scaling={**factors, "original_max_position_embeddings": 16})
    beside = read_values(rope_scaling=factors, original_max_position_embeddings=16)
    assert inside == beside
    assert inside.factor == 4.0


def test_yarn_with_a_null_factor_takes_the_ratio_of_lengths():
    assert read({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}).factor == 4.0


@pytest.mark.parametrize("rope_type", ["yarn", "longrope", "llama3"])
def test_an_original_length_beside_rope_parameters_comes_before_one_inside(rope_type):
    rope = {
        "rope_type": rope_type,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}),
        **({"short_factor": [1.0] * 20, "long_factor": [2.0] * 20} if rope_type == "longrope" else {}),
    }
    assert read(rope, original_max_position_embeddings=16).original_max_position == 16
    assert read(rope).original_max_position == 32
    del rope["original_max_position_embeddings"]
    assert read(rope).original_max_position == 64


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, f"rope type 'spiral' is not supported; supported: {', '.join(ROPE_TYPES)}"),
        ({"type": "mrope"}, "rope type 'mrope' is not supported"),
        ({"rope_type": "linear"}, "'linear' needs a number 'factor' in rope_parameters; found none"),
        ({"rope_type": "dynamic", "factor": "2"}, "rope_parameters.factor='2'; a number is needed"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs a number 'low_freq_factor'"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "needs low_freq_factor below high_freq_factor; found 4.0 for both",
        ),
        ({"rope_type": "yarn", "original_max_position_embeddings": 16}, "'yarn' needs a number 'factor'"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "'yarn' needs a rope_theta other than 1"),
        ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor=0; a positive number is needed"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_parameters.factor=nan; a .*number is needed"),
        ({"rope_type": ["yarn"]}, r"rope_parameters.rope_type=\['yarn'\]; a text is needed"),
        ({"rope_theta": -1.0}, "rope_parameters.rope_theta=-1.0; a positive number is needed"),
        ({"rope_type": "longrope", "short_factor": [1.0, None]}, r"rope_parameters.short_factor\[1\]=None; a list"),
        ({"full_attention": {"rope_theta": 1e4}}, r"a rope for each kind of layer \(rope_parameters: full_attention\)"),
        (
            {"mrope_section": [16, 24, 24]},
            r"rope_parameters.mrope_section=\[16, 24, 24\], to which Any gives no meaning",
        ),
        ({"partial_rotary_factor": 0}, "rotates 0 elements per head"),
        ({"partial_rotary_factor": "0.5"}, "rope_parameters.partial_rotary_factor='0.5'; a number is needed"),
        ({"rope_type": "longrope"}, "needs 20 numbers in 'short_factor' .*found 0"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 20, "long_factor": [1.0] * 3},
            "needs 20 numbers in 'long_factor' .*found 3",
        ),
        ({"partial_rotary_factor": 0.125}, "rotates 5 elements per head; rope needs an even count"),
        ({"partial_rotary_factor": 0.01}, "rotates 0 elements per head"),
        ({"partial_rotary_factor": 1.5}, "rotates 60 elements per head"),
    ],
    ids=str,
)
def test_what_rope_cannot_be_is_an_error_that_names_it(parameters, message):
    with pytest.raises(ValueError, match=message):
        read(parameters)


#: Of each key, what is drawn: sound values, values at an edge, and what is none.
DRAWN = {
    "factor": (1.0, 2, 4.0, 8.0, 0.5, 32, None),
    "original_max_position_embeddings": (16, 32, 64, 128, 4096, 64.0, None),
    "attention_factor": (1.0, 0.5, 1.3, 0, None),
    "beta_fast": (32, 32.0, 1, 4, 0, 64.0, None),
    "beta_slow": (1, 1.0, 32, 0, 1e6, 2, None),
    "mscale": (1.0, 0.707, 0, None),
    "mscale_all_dim": (1.0, 0.707, 0, None),
    "truncate": (True, False, None),
    "low_freq_factor": (1, 1.0, 2.0, 4.0, None),
    "high_freq_factor": (4, 4.0, 8.0, 1.0, None),
    "rope_theta": (1e4, 1e6, 500000, 5, 1, None),
}
#: Values that neither takes, wherever they stand.
NONE_AT_ALL = ("2", [1.0], {"a": 1}, float("nan"), -4.0)


def drawn(rng):
    """A random rope of each type, and keys beside it."""
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "llama3", "longrope"])
    rope = {"rope_type" if rng.random() < 0.8 else "type": kind}
    for key, values in DRAWN.items():
        if rng.random() < (0.35 if key in ("mscale", "mscale_all_dim", "attention_factor") else 0.75):
            rope[key] = rng.choice(values)
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            rope[key] = [rng.uniform(1, 4) for _ in range(HEAD_DIM // 2)]
    if rng.random() < 0.05:
        rope[rng.choice(list(DRAWN))] = rng.choice(NONE_AT_ALL)
    beside = {"rope_theta": rng.choice((1e4, 2e5))} if rng.random() < 0.4 else {}
    if rng.random() < 0.2:
        beside["original_max_position_embeddings"] = rng.choice((16, 32, 64))
    if rng.random() < 0.2:
        beside["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    return {"rope_parameters": rope, **beside}


def hugging_faces(values, seq_len):
    """Its frequencies and factor; None where it has none, or none that are numbers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=64, **copy.deepcopy(values))
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            frequencies, factor = LlamaRotaryEmbedding(config).inv_freq, 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    except Exception:  # noqa: BLE001 - whatever it raises, it has no rope
        return None
    if not torch.isfinite(frequencies).all() or not isinstance(factor, (int, float)):
        return None
    return frequencies, float(factor)


@pytest.mark.parametrize("seed", range(20))
def test_any_rope_is_hugging_faces_or_refused_by_both(seed):
    rng, compared = random.Random(seed), 0
    for _ in range(150):
        values, seq_len = drawn(rng), rng.choice((48, 64))
        expected = hugging_faces(values, seq_len)
        try:
            ours = read_values(**values)
        except ValueError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert "\n" not in refused
            assert expected is None or is_none_at_all(values), (values, refused)
            continue
        assert expected is not None, values
        torch.testing.assert_close(inverse_frequencies(ours, seq_len), expected[0], rtol=1e-6, atol=0)
        assert ours.attention_factor == pytest.approx(expected[1], rel=1e-6)
        compared += 1
    assert compared > 50


def is_none_at_all(values):
    """Whether a rope has a value that is refused although Hugging Face, which warns of it, computes something."""
    rope = values.get("rope_scaling") or values["rope_parameters"]
    drawn_none = any(repr(value) in map(repr, NONE_AT_ALL) for key, value in rope.items() if key in DRAWN)
    flat = "low_freq_factor" in rope and rope["low_freq_factor"] == rope.get("high_freq_factor")
    return drawn_none or flat or rope.get("original_max_position_embeddings", 0) is None
