"""``--hf-overrides`` of a rope, in the real vLLM: the base is still the checkpoint's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from atom_core.models.read_config import read_model_config
from atom_plugin.vllm.checkpoint_config import values_of
from tests.integration.questions import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


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
