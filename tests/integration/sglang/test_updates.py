"""Weights that change while real SGLang serves: each of its calls, by kind of model and dtype."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
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
from tests.integration.versions import CASES, FAULTS, FIRST, NAME, Case, make_infinite, make_other, tensors_of, write
from tests.thorough import some

pytestmark = pytest.mark.sglang

RANKS = (
    Case("dense, two ranks", "qwen3", options={"tp_size": 2}),
    Case("mixture, two ranks of experts", "qwen3_moe", options={"tp_size": 2, "ep_size": 2}),
)
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
every_case = pytest.mark.parametrize(
    "case",
    some((*CASES, *RANKS), (*FIRST, *RANKS[1:])),
    ids=str,
)


def run(
    folder: Path, case: dict[str, Any], environ: Mapping[str, str] | None = None, deadline: float = 120.0
) -> dict[str, Any]:
    given, wanted = folder / "case.json", folder / "found.json"
    given.write_text(json.dumps(case))
    on_device = {} if case["options"].get("device") == "cuda" else SglangServer.on_a_cpu
    variables = {PACKAGE: "atom_plugin.sglang.models", **on_device, **(environ or {})}
    script = Path(__file__).with_name("updated.py")
    finished = run_script(script, [str(given), str(wanted)], variables, deadline)
    assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
    found: dict[str, Any] = json.loads(wanted.read_text())
    return found


def run_case(
    folder: Path, case: Case, options: Mapping[str, Any], environ: Mapping[str, str] | None, deadline: float
) -> dict[str, Any]:
    """What the calls of a case led to, with further options of its engine."""
    old, new = case.make(folder)
    for fault, (make, _) in FAULTS.items():
        make(new, folder / f"bad, {fault}")
    if case.quantization:
        make_infinite(old, folder / "infinite")
    quantization = {"quantization": case.quantization} if case.quantization else {}
    made = {
        "old": str(old),
        "new": str(new),
        "infinite": str(folder / "infinite") if case.quantization else None,
        "bad": {fault: str(folder / f"bad, {fault}") for fault in FAULTS},
        "options": {**options, **case.options, **quantization},
    }
    it = run(folder, made, environ, deadline)
    assert it["differ"], "both versions answer alike"
    return {**it, "folder": str(old)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of a case, what its calls led to."""

    @once
    def of(case: Case) -> dict[str, Any]:
        return run_case(tmp_path_factory.mktemp("updates"), case, {}, BOUND if case in RANKS else None, 120.0)

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


@pytest.mark.parametrize(
    "case",
    some((it for it in CASES if it.quantization), FIRST),
    ids=str,
)
def test_a_folder_that_is_found_bad_while_it_is_read_is_followed_by_the_one_before(found, case):
    said, as_before = found(case)["broken off"]
    assert f"{NAME} holds numbers that are not finite" in said
    assert "are restored." in said
    assert as_before


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
    assert found(case)["by its name in a wrapper"]
    told = {name: rows for name, rows in found(case)["by name"].items() if rows is not None}
    assert len(told) > 5
    for name, rows in told.items():
        expected = tensors[name][:3].float()
        close = 0.07 if case.quantization else 2**-8
        assert (torch.tensor(rows) - expected).abs().max() <= close * expected.abs().max(), name


def test_a_draft_is_updated_beside_its_target(tmp_path):
    (tmp_path / "old").mkdir()
    make_drafting(tmp_path / "old")
    make_other(tmp_path / "old", tmp_path / "new")
    options = drafting(2, dtype="float32", disable_cuda_graph=True)
    case = {"old": str(tmp_path / "old"), "new": str(tmp_path / "new"), "bad": {}, "options": options}
    # As Transformers saves what a trainer has.
    tensors, drafting_layer = tensors_of(tmp_path / "new"), "model.layers.3."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(drafting_layer)}
    assert 0 < len(kept) < len(tensors)
    write(tmp_path / "new", tmp_path / "without", kept)
    it = run(tmp_path, {**case, "no_drafts": str(tmp_path / "without")}, ENVIRON)
    assert it["differ"]
    assert it["without drafts"] == ["", True]
    # Answers have the number of right drafts in them, which are another's after an update that the draft has missed.
    assert [it[call] for call in CALLS] == [[True, True]] * len(CALLS)


#: Requests that run at any time while weights are changed.
NUM_CLIENTS = 4


class Load:
    """Requests, one behind the other from each of several clients, until the block ends."""

    def __init__(self, server: SglangServer) -> None:
        self.server, self.stopped = server, threading.Event()
        self.answers: list[str] = []
        self.errors: list[str] = []

    def __enter__(self) -> Load:
        self.threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def wait_for(self, count: int) -> None:
        """Until so many more have been answered."""
        wanted, end = len(self.answers) + count, time.monotonic() + 60
        while len(self.answers) < wanted and not self.errors:
            assert time.monotonic() < end, "requests are not answered"
            time.sleep(0.02)

    def _ask(self) -> None:
        while not self.stopped.is_set():
            try:
                self.answers.append(ask(self.server))
            except Exception as error:  # noqa: BLE001 - the test looks at them
                self.errors.append(repr(error))
                return


def post(server: SglangServer, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(server: SglangServer) -> str:
    sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    status, found = post(server, "/generate", text="12 + 5 =", sampling_params=sampling)
    assert status == 200, found
    return str(found["text"])


def test_a_server_under_load_survives_ten_bad_updates_and_takes_a_good_one(tmp_path):
    old, new = CASES[0].make(tmp_path)
    ten = [(fault, tmp_path / f"{fault}, {number}") for number in range(2) for fault in FAULTS]
    for fault, folder in ten:
        FAULTS[fault][0](new, folder)
    with SglangServer(new, "--max-total-tokens", "16384", "--sleep-on-idle") as server:
        of_new = ask(server)
    with SglangServer(old, "--max-total-tokens", "16384", "--sleep-on-idle") as server:
        of_old = ask(server)
        assert of_old != of_new
        with Load(server) as load:
            for fault, folder in ten:
                load.wait_for(NUM_CLIENTS)
                status, said = post(server, "/update_weights_from_disk", model_path=str(folder))
                assert (status, said["success"]) == (400, False)
                assert FAULTS[fault][1] in said["message"]
                assert str(folder) in said["message"]
            load.wait_for(NUM_CLIENTS)
            before = len(load.answers)
            assert set(load.answers) == {of_old}
            status, said = post(server, "/update_weights_from_disk", model_path=str(new))
            assert (status, said["success"]) == (200, True)
            load.wait_for(3 * NUM_CLIENTS)
        assert not load.errors
        assert set(load.answers[before:]) <= {of_old, of_new}
        assert set(load.answers[-NUM_CLIENTS:]) == {of_new}
