"""What SGLang makes of a hybrid's configuration, and what our model and SGLang's pools get of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from atom_core.config import GatedDeltaNetConfig
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_draft_class
from tests.hybrid_checkpoints import HYBRIDS, make_hybrid

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

ALTERNATING = ["linear_attention", "full_attention"] * 2
FAMILIES = list(HYBRIDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a family's checkpoint as Transformers saves it, with full attention in each second layer."""
    places = {}

    def made(family):
        if family not in places:
            place = tmp_path_factory.mktemp("hybrid") / family
            places[family] = make_hybrid(place, family, extra={}, layer_types=ALTERNATING)
        return places[family]

    return made


def config_of(folder, **options):
    """SGLang's."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(str(folder), **options)


def arguments(**changes):
    return SimpleNamespace(
        **{
            "enable_multimodal": None,
            "json_model_override_args": "{}",
            "device": "cuda",
            "mamba_radix_cache_strategy": "auto",
            "page_size": None,
            "disable_radix_cache": False,
            "tokenizer_worker_num": 1,
            **changes,
        }
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_rope_are_the_file_s(family, folder):
    from atom_plugin.sglang.checkpoint_config import values_of

    config = read_model_config(values_of(config_of(folder(family)).hf_config))
    assert config.architecture == HYBRIDS[family].architecture
    assert [isinstance(layer.mixer, GatedDeltaNetConfig) for layer in config.layers] == [True, False, True, False]
    assert (config.rope.theta, config.rope.rotary_dim) == (1e7, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_s_pools_are_for_the_same_layers(family, folder):
    from atom_plugin.sglang.hybrid import overrides

    given = overrides(arguments(json_model_override_args='{"eos_token_id": 64}'), config_of(folder(family)).hf_config)
    again = config_of(folder(family), model_override_args=given["json_model_override_args"])
    assert again.hf_config.get_text_config().full_attention_layer_ids == [1, 3]
    assert again.hf_config.eos_token_id == 64
    assert given.get("enable_multimodal") == (False if HYBRIDS[family].wrapper else None)


def test_nothing_is_overridden_where_the_file_has_what_sglang_reads(tmp_path):
    from atom_plugin.sglang.hybrid import overrides

    make_hybrid(tmp_path / "it", "qwen3_5")
    hf_config = config_of(tmp_path / "it").hf_config
    assert overrides(arguments(), hf_config) == {}
    # SGLang copies states for prefixes only on accelerators while it schedules ahead.
    assert overrides(arguments(device="cpu"), hf_config) == {"disable_overlap_schedule": True}
    asked = arguments(device="cpu", mamba_radix_cache_strategy="no_buffer")
    assert overrides(asked, hf_config) == {}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_vl"])
def test_overrides_of_the_configuration_are_what_our_models_read(family, folder):
    from atom_plugin.sglang.checkpoint_config import values_of

    changes = {"rms_norm_eps": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    given = json.dumps({"text_config": changes} if HYBRIDS[family].wrapper else changes)
    config = read_model_config(values_of(config_of(folder(family), model_override_args=given).hf_config))
    assert (config.rms_norm_eps, config.rope.theta) == (0.25, 500.0)


def test_an_override_outside_the_text_of_a_wrapper_is_refused(folder):
    from atom_plugin.sglang.hybrid import overrides

    given = arguments(json_model_override_args='{"rope_scaling": {"rope_type": "yarn"}, "eos_token_id": 64}')
    with pytest.raises(ValueError, match=r'args gives rope_scaling outside text_config.*Write \{"text_config": '):
        overrides(given, config_of(folder("qwen3_5_vl")).hf_config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_is_of_the_file_s_architecture(family, tmp_path):
    from atom_plugin.sglang.checkpoint_config import architecture_of_file, values_of

    config = config_of(make_hybrid(tmp_path / "it", family), is_draft_model=True).hf_config
    assert config.architectures[0].endswith("ForCausalLMMTP")
    architecture = architecture_of_file(config)
    assert architecture == HYBRIDS[family].architecture
    draft = load_draft_class(architecture).from_hf(values_of(config, architecture))
    assert len(draft.layers) == 1


def test_a_request_with_an_image_is_refused_in_one_line(folder):
    from sglang.srt.managers.io_struct import GenerateReqInput

    from atom_plugin.sglang.requests import refuse_media

    text, other = (config_of(folder(family), enable_multimodal=False) for family in ("qwen3_5_vl", "qwen3_5"))
    request = GenerateReqInput(input_ids=[1, 2], image_data="here.png")
    with pytest.raises(ValueError, match="serves only the text of Qwen3_5ForConditionalGeneration: a request cannot"):
        refuse_media(text, request)
    refuse_media(text, GenerateReqInput(input_ids=[1, 2]))
    refuse_media(other, request)


def test_a_prompt_without_a_token_is_refused(folder):
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

    from atom_plugin.sglang.requests import refuse_empty

    ours, others = config_of(folder("qwen3_5")), SimpleNamespace(hf_config=SimpleNamespace(architectures=["Another"]))
    empty, session = GenerateReqInput(text=""), GenerateReqInput(text="", session_params={"id": "1"})
    with pytest.raises(ValueError, match="The prompt has no token"):
        refuse_empty(ours, empty, [])
    for model, request, tokens in (
        (ours, empty, [1]),
        (ours, empty, None),
        (ours, session, []),
        (ours, EmbeddingReqInput(text=""), []),
        (others, empty, []),
    ):
        refuse_empty(model, request, tokens)
