"""Weights that change while real SGLang serves: each of its calls, by kind of model and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.mixtures import make_drafting
from tests.integration.once import once
from tests.integration.preloaded import run_script
from tests.integration.server import SglangServer
from tests.integration.sglang.offline import PACKAGE, drafting
from tests.integration.sglang.test_drafts import ENVIRON
from tests.integration.sglang.updated import CALLS
from tests.integration.versions import CASES, FAULTS, Case, make_other, tensors_of

pytestmark = pytest.mark.sglang

RANKS = (
    Case("dense, two ranks", "qwen3", options={"tp_size": 2}),
    Case("mixture, two ranks of experts", "qwen3_moe", options={"tp_size": 2, "ep_size": 2}),
)
#: Each model and each dtype once; the other pairs take as long again.
FIRST = [it for it in CASES if it.name in ("dense, bf16", "mixture, stored fp8", "mla, fp8 made at load")]
every_case = pytest.mark.parametrize(
    "case", [it if it in FIRST else pytest.param(it, marks=pytest.mark.slow) for it in (*CASES, *RANKS)], ids=str
)


def run(folder: Path, case: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, Any]:
    given, wanted = folder / "case.json", folder / "found.json"
    given.write_text(json.dumps(case))
    variables = {PACKAGE: "atom_plugin.sglang.models", **SglangServer.on_a_cpu, **(environ or {})}
    script = Path(__file__).with_name("updated.py")
    finished = run_script(script, [str(given), str(wanted)], variables, 300.0)
    assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
    found: dict[str, Any] = json.loads(wanted.read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of a case, what its calls led to."""

    @once
    def of(case: Case) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("updates")
        old, new = case.make(folder)
        for fault, (make, _) in FAULTS.items():
            make(new, folder / f"bad, {fault}")
        it = run(
            folder,
            {
                "old": str(old),
                "new": str(new),
                "bad": {fault: str(folder / f"bad, {fault}") for fault in FAULTS},
                "options": {**case.options, **({"quantization": case.quantization} if case.quantization else {})},
            },
        )
        assert it["differ"], "both versions answer alike"
        return {**it, "folder": str(old)}

    return of


@pytest.mark.parametrize("call", CALLS)
@every_case
def test_answers_are_those_of_a_fresh_start_bit_for_bit(found, case, call):
    assert found(case)[call] == [True, True]


@pytest.mark.parametrize("fault", FAULTS)
@every_case
def test_a_bad_folder_is_refused_with_its_name_and_the_old_weights_stay(found, case, fault):
    said = found(case)["refused"][fault]
    assert FAULTS[fault][1] in said
    assert f"bad, {fault}" in said, "the folder"
    assert "Nothing was overwritten" in said
    assert found(case)["after refusals"]


@every_case
def test_a_bucket_that_does_not_fit_is_refused_and_the_server_goes_on(found, case):
    it = found(case)
    assert "misshapen (1)" in it["refused first"]
    assert "Nothing was overwritten" in it["refused first"]
    assert it["after a refused first bucket"]
    assert "No request is served until a whole update has arrived" in it["refused later"]
    assert it["after a refused later bucket"]


@every_case
def test_weights_are_told_under_the_names_of_checkpoints(found, case):
    tensors = tensors_of(Path(found(case)["folder"]))
    told = {name: rows for name, rows in found(case)["by name"].items() if rows is not None}
    assert len(told) > 5
    for name, rows in told.items():
        expected = tensors[name][:3].float()
        close = 0.07 if case.quantization else 2**-8
        assert (torch.tensor(rows) - expected).abs().max() <= close * expected.abs().max(), name
