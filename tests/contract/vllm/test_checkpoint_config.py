"""The values of ``config.json`` in the real vLLM: overridden ones, those of drafts and of multimodal checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import get_config, get_hf_text_config

from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_draft_class
from atom_plugin.vllm.checkpoint_config import values_of, values_of_draft
from atom_plugin.vllm.runtime import num_positions
from tests.hybrid_checkpoints import make_hybrid
from tests.integration.questions import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_base_is_the_checkpoints_own(tmp_path, family, key):
    shutil.copytree(checkpoint(family), tmp_path, dirs_exist_ok=True)
    file = json.loads(Path(tmp_path, "config.json").read_text())
    file["rope_parameters"] = {"rope_type": "default", "rope_theta": 777000.0}
    Path(tmp_path, "config.json").write_text(json.dumps(file))
    config = EngineArgs(str(tmp_path), hf_overrides={key: dict(YARN)}, model_impl="atom").create_engine_config()
    (architecture,) = file["architectures"]
    rope = read_model_config(values_of(config.model_config, architecture)).rope
    assert (rope.rope_type, rope.theta, rope.original_max_position) == ("yarn", 777000.0, 128)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_draft_has_the_rope_of_its_target_and_as_many_positions(family):
    """vLLM has it draft at the target's positions, and gives it neither the overrides nor the target's length."""
    file = json.loads(Path(checkpoint(family), "config.json").read_text())
    given = {**file["rope_parameters"], **YARN}
    config = EngineArgs(
        checkpoint(family),
        hf_overrides={"rope_parameters": given},
        model_impl="atom",
        enable_prefix_caching=False,
        speculative_config={**MTP, "max_model_len": 64},
    ).create_engine_config()
    (architecture,) = file["architectures"]
    target = read_model_config(values_of(config.model_config, architecture))
    draft = load_draft_class(architecture).from_hf(values_of_draft(config, architecture))
    assert draft.rope == target.rope
    assert draft.rope.factor == 4.0
    draft_config = config.speculative_config.draft_model_config
    assert draft_config.max_model_len == 64
    assert num_positions(config, draft_config) == num_positions(config, config.model_config) > 64


@pytest.fixture
def wrapper(tmp_path):
    """A multimodal checkpoint, whose configuration may be changed."""
    folder = make_hybrid(tmp_path / "wrapper", "qwen3_5_vl", num_hidden_layers=8, layer_types=None)

    (folder / "model.safetensors").unlink()  # which has a head of its own, and that counts

    def read(outer, text, overrides=None):
        path = folder / "config.json"
        values = json.loads(path.read_text())
        for part, changes in ((values, outer), (values["text_config"], text)):
            part.update(changes)
            for key in [key for key, value in changes.items() if value is None]:
                del part[key]
        path.write_text(json.dumps(values))
        config = get_config(str(folder), False)
        for key, value in (overrides or {}).items():
            setattr(config.text_config, key, value)
        found = SimpleNamespace(
            model=str(folder), revision=None, hf_config=config, hf_text_config=get_hf_text_config(config)
        )
        return read_model_config(values_of(found, config.architectures[0])), read_model_config(values)

    return read


@pytest.mark.parametrize(
    ("outer", "text", "tied"), [(True, None, True), (True, False, True), (False, True, False), (False, None, False)]
)
def test_whether_head_and_embedding_are_one_is_said_by_the_whole_checkpoint(wrapper, outer, text, tied):
    for config in wrapper({"tie_word_embeddings": outer}, {"tie_word_embeddings": text}):
        assert config.tie_word_embeddings == tied


def test_a_multimodal_checkpoint_may_be_cut_to_fewer_layers(wrapper):
    config, whole = wrapper({}, {}, {"num_hidden_layers": 4})
    assert whole.num_layers > 4
    assert config.layers == whole.layers[:4]


@pytest.mark.parametrize("key", ["rope_parameters", "num_hidden_layers"])
def test_an_override_outside_the_text_of_a_multimodal_checkpoint_is_refused(tmp_path, key):
    """Neither vLLM's own model nor ours would read it."""
    folder = make_hybrid(tmp_path / "wrapper", "qwen3_5_vl")
    value = 2 if key == "num_hidden_layers" else {"rope_type": "yarn", "factor": 4.0}

    def configure(overrides):
        options = {"model_impl": "atom", "language_model_only": True, "hf_overrides": overrides}
        return EngineArgs(str(folder), **options).create_engine_config()

    with pytest.raises(ValueError, match=f'--hf-overrides gives {key} outside text_config.*Write {{"text_config":'):
        configure({key: value, "eos_token_id": 7})
    configure({"eos_token_id": 7, "tie_word_embeddings": False})
