"""What vLLM and its users look up by name: parameters, modules to put hooks on, and weights that each rank saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.integration.once import once
from tests.integration.preloaded import run_script
from tests.integration.questions import checkpoint
from tests.integration.versions import CASES, FIRST, Case
from tests.thorough import some

pytestmark = pytest.mark.vllm

DENSE, *OTHERS = CASES
TWO_RANKS = Case("dense, two ranks", "qwen3", options={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})
WATCHED = ["model", "model.embed_tokens", "model.layers.3", "model.layers.3.self_attn", "model.layers.3.self_attn.attn"]
WATCHED += ["model.layers.3.mlp", "model.norm", "lm_head"]
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(DENSE, marks=pytest.mark.smoke),
        *some(OTHERS, FIRST),
        pytest.param(TWO_RANKS, marks=pytest.mark.slow),
    ],
    ids=str,
)


def run(folder: Path, model: Path | str, options: dict[str, Any], **case: Any) -> dict[str, Any]:
    folder.mkdir()
    given, wanted = folder / "case.json", folder / "found.json"
    given.write_text(json.dumps({"model": str(model), "folder": str(folder / "shards"), "options": options, **case}))
    # Functions go to workers of other processes.
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    finished = run_script(Path(__file__).with_name("looked_at.py"), [str(given), str(wanted)], environ, 200.0)
    assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
    found: dict[str, Any] = json.loads(wanted.read_text())
    return found


def options_of(case: Case) -> dict[str, Any]:
    return {**case.options, **({"quantization": case.quantization} if case.quantization else {})}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a case, an engine with hooks that has saved its weights, and the folder."""

    @once
    def of(case: Case) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("saved")
        old, _ = case.make(folder)
        it = run(folder / "it", old, options_of(case), watched=WATCHED, save=True)
        return it, folder / "it" / "shards"

    return of


@every_case
def test_hooks_are_on_modules_by_their_names(saved, case):
    it, _ = saved(case)
    assert set(it["seen"]) == set(WATCHED)
    assert all(count > 0 for count in it["seen"].values())


@every_case
def test_parameters_have_the_names_that_checkpoints_have(saved, case):
    it, _ = saved(case)
    folder = Path(checkpoint(case.family))
    drafting = f"model.layers.{json.loads((folder / 'config.json').read_text())['num_hidden_layers']}."
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name for name in file.keys() if not name.startswith((drafting, "mtp."))}  # noqa: SIM118
    single = {name for name in stored if name.endswith(("norm.weight", "o_proj.weight", "embed_tokens.weight"))}
    assert single <= set(it["names"])
    assert all(name.startswith(("model.", "lm_head.")) for name in it["names"])


@every_case
def test_weights_are_saved_by_rank_and_served_again(saved, tmp_path, case):
    before, folder = saved(case)
    assert before["answer then"] == before["answer"]
    after = run(tmp_path / "it", folder, {**options_of(case), "load_format": "sharded_state"})
    assert after["answer"] == before["answer"]


def test_saved_weights_of_another_quantisation_are_refused(saved, tmp_path):
    _, folder = saved(DENSE)
    with pytest.raises(
        AssertionError, match=r"(?s)does not fit Qwen3ForCausalLM: missing .*--quantization and kernels"
    ):
        run(tmp_path / "it", folder, {"load_format": "sharded_state", "quantization": "fp8"})
