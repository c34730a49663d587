"""Drafts by the layers of another folder than the target's: they fit the target, or are refused before loading.

vLLM makes every model that has layers for multi-token prediction draft by these, whatever method was asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.hybrid_checkpoints import make_hybrid
from tests.integration.questions import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Checkpoints of random weights, by family; one more has other sizes."""
    made = tmp_path_factory.mktemp("drafts")
    found = {name: make_hybrid(made / name, name) for name in ("qwen3_5", "qwen3_5_vl", "qwen3_next")}
    found["the same again"] = Path(shutil.copytree(found["qwen3_5"], made / "again"))
    found["narrow"] = make_hybrid(made / "narrow", "qwen3_5", hidden_size=32)
    found["few tokens"] = make_hybrid(
        made / "few", "qwen3_5", vocab_size=256, eos_token_id=1, bos_token_id=1, pad_token_id=1
    )
    return found


def configure(target: Path | str, **speculative: Any) -> VllmConfig:
    """vLLM's configuration of a command."""
    return EngineArgs(
        str(target),
        model_impl="atom",
        enable_prefix_caching=False,
        language_model_only=True,
        speculative_config={"num_speculative_tokens": 1, **speculative},
    ).create_engine_config()


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
@pytest.mark.parametrize(
    ("draft", "differs"),
    [
        ("narrow", "its hidden_size is 32, the target's 64"),
        ("few tokens", "its vocab_size is 256, the target's 512"),
        ("qwen3_next", "its architecture is Qwen3NextForCausalLM, the target's Qwen3_5ForCausalLM"),
    ],
)
def test_another_model_is_refused(folders: Mapping[str, Path], method: str, draft: str, differs: str) -> None:
    with pytest.raises(
        ValueError, match=f"layers of {folders[draft]}, which do not fit the target: {differs}. vLLM drafts"
    ):
        configure(folders["qwen3_5"], method=method, model=str(folders[draft]))


@pytest.mark.parametrize("draft", ["the same again", "qwen3_5_vl"])
def test_the_same_layers_may_lie_elsewhere(folders: Mapping[str, Path], draft: str) -> None:
    config = configure(folders["qwen3_5"], method="mtp", model=str(folders[draft]))
    assert config.speculative_config.draft_model_config.hf_config.architectures == ["AtomQwen35Draft"]


def test_deepseeks_layers_are_asked_too(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "hidden_size": 2 * values["hidden_size"]}))
    with pytest.raises(ValueError, match=f"its hidden_size is {2 * values['hidden_size']}, the target's"):
        configure(checkpoint("deepseek_v3"), method="mtp", model=str(tmp_path))
