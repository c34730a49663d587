"""What SGLang and its users look up by name: hooks, dumps of tensors, weights, and their checksums and copies on disk.

Beside a dense model of SGLang's own, which its CPU can run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.integration.mixtures import make_drafting
from tests.integration.names import MODELS, comparable, make
from tests.integration.once import once
from tests.integration.preloaded import run_script
from tests.integration.questions import checkpoint
from tests.integration.server import SglangServer
from tests.integration.sglang.offline import PACKAGE, drafting
from tests.integration.sglang.test_drafts import ENVIRON
from tests.integration.sglang.test_updates import BOUND, RANKS
from tests.integration.versions import CASES, FIRST, Case
from tests.thorough import some

pytestmark = pytest.mark.sglang

STAND_INS = Path(__file__).with_name("stand_ins")
FLOAT32 = {"dtype": "float32"}
LAYER = "model.layers.1"
#: Modules that a hook can be on, in SGLang's words.
OF_ALL = ("model", "model.embed_tokens", LAYER, "model.norm", "lm_head")
OF_LAYER = ("input_layernorm", "self_attn", "self_attn.attn", "self_attn.o_proj", "post_attention_layernorm", "mlp")
DENSE = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
MIXTURE = ("mlp.gate", "mlp.experts")
LATENTS = ("self_attn.fused_qkv_a_proj_with_mqa", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
SHARED = ("mlp.shared_experts", "mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj")
HOOKED: Mapping[str, tuple[str, ...]] = {
    "qwen3": DENSE,
    "qwen3_moe": ("self_attn.qkv_proj",),  # its layer 1 is dense
    "glm4_moe": ("self_attn.qkv_proj", *MIXTURE, *SHARED),
    "deepseek_v3": (*MIXTURE, *LATENTS, *SHARED),
}
#: What SGLang's dumps have and ours lack: attention applies the first three, and the last is the product's in front.
DUMPED_BY_SGLANG_ALONE = ("q_norm", "k_norm", "rotary_emb", "act_fn")


def run(folder: Path, ours: bool = True, environ: Mapping[str, str] | None = None, **case: Any) -> dict[str, Any]:
    folder.mkdir()
    given, wanted = folder / "case.json", folder / "found.json"
    given.write_text(json.dumps({"folder": str(folder / "files"), **case}))
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    package = "atom_plugin.sglang.models" if ours else None
    variables = {PACKAGE: package, "PYTHONPATH": path, **SglangServer.on_a_cpu, **(environ or {})}
    script = Path(__file__).with_name("looked_at.py")
    finished = run_script(script, [str(given), str(wanted)], variables, 120.0)
    assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
    return {**json.loads(wanted.read_text()), "log": finished.log}


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """A dense model, ours and SGLang's own, with hooks and dumps and all."""

    @once
    def of(ours: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("side") / "it"
        hooked = (*OF_ALL, *(f"{LAYER}.{name}" for name in (*OF_LAYER, *DENSE)))
        it = run(
            folder, ours, model=checkpoint("qwen3"), options=FLOAT32, hooked=hooked, dumps=True, checks=True, save=True
        )
        return {**it, "passes": passes_of(folder / "files" / "dumps"), "state": state_of(folder / "files" / "shards")}

    return of


def passes_of(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(file) for file in sorted(folder.glob("*/Pass*.pt"))]


def state_of(folder: Path) -> dict[str, list[int]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return found


def test_parameters_are_called_and_shaped_as_sglangs(sides):
    assert sides(True)["state"] == sides(False)["state"]


def test_checksums_are_those_of_sglangs_own_model(sides):
    assert sides(True)["checksums"] == sides(False)["checksums"]


def test_what_needs_a_gpu_stays_so(sides):
    """SGLang compares by a kernel of CUDA's."""
    ours, native = sides(True)["compared"], sides(False)["compared"]
    assert [it[0] for it in ours] == [it[0] for it in native]
    assert ours[0][0]


def test_dumps_have_what_sglangs_have_under_the_same_names(sides):
    ours, native = sides(True)["passes"], sides(False)["passes"]
    for number in range(3):
        lacking = {name for name in native[number] if name not in ours[number]}
        assert {name.rpartition(".")[2] for name in lacking} <= set(DUMPED_BY_SGLANG_ALONE)
        assert set(ours[number]) - set(native[number]) <= {"lm_head"}
        for name in set(ours[number]) & set(native[number]):
            found, expected = (
                it if isinstance(it, list) else [it] for it in (ours[number][name], native[number][name])
            )
            # The first norm of all gives the stream as well.
            assert len(found) == len(expected) or name == "model.layers.0.input_layernorm"
            for tensor, wanted in zip(found, expected, strict=False):
                assert (tensor - wanted).abs().max() <= 1e-5 * max(wanted.abs().max(), 1), name


def test_dumps_can_be_of_some_layers(tmp_path):
    options = {**FLOAT32, "debug_tensor_dump_layers": [1]}
    run(tmp_path / "it", model=checkpoint("qwen3"), options=options, dumps=True)
    first, *_ = passes_of(tmp_path / "it" / "files" / "dumps")
    assert {name.split(".")[2] for name in first if name.startswith("model.layers.")} == {"1"}


@pytest.mark.parametrize("family", HOOKED)
def test_hooks_see_tensors_of_modules_by_their_names(sides, tmp_path, family):
    names = {*OF_ALL, *(f"{LAYER}.{name}" for name in (*OF_LAYER, *HOOKED[family]))}
    fired = (
        sides(True)["fired"]
        if family == "qwen3"
        else run(tmp_path / "it", model=checkpoint(family), options=FLOAT32, hooked=sorted(names))["fired"]
    )
    assert set(fired) == names
    assert all(is_of_tensors(output) for _, output in fired.values())


def is_of_tensors(described: Any) -> bool:
    """Whether it is a shape, or two of them: what is to be added and the stream, as SGLang's layers give them."""
    return all(isinstance(it, int) for it in described) or [is_of_tensors(it) for it in described] == [True, True]


def test_hooks_see_what_they_see_of_sglangs_own_model(sides):
    ours, native = (sides(it)["fired"] for it in (True, False))
    # SGLang's own head is not called, and of a sum its layers give the last summand where ours give both.
    assert set(ours) - set(native) == {"lm_head"}
    for name, (_, output) in native.items():
        wanted = [it for it in output if it is not None] if isinstance(output[0], list) else [output]
        found = ours[name][1] if isinstance(ours[name][1][0], list) else [ours[name][1]]
        assert found[: len(wanted)] == wanted, name


def test_dumps_of_a_target_and_its_draft_stand_apart(tmp_path):
    (tmp_path / "model").mkdir()
    make_drafting(tmp_path / "model")
    options = drafting(2, **FLOAT32)
    run(tmp_path / "it", environ=ENVIRON, model=str(tmp_path / "model"), options=options, dumps=True)
    of_target, of_draft = (passes_of(tmp_path / "it" / "files" / "dumps" / it) for it in ("target", "draft"))
    assert any("model.layers.1.self_attn.o_proj" in it for it in of_target)
    assert any({"model.decoder.self_attn.o_proj", "model.decoder.eh_proj"} <= set(it) for it in of_draft)


def test_weights_are_told_by_names_of_stacked_ones_too(tmp_path):
    names = [f"model.layers.1.self_attn.{it}_proj.weight" for it in "qkv"]
    stacked = [f"model.layers.1.{it}.weight" for it in ("self_attn.qkv_proj", "mlp.gate_up_proj")]
    it = run(tmp_path / "it", model=checkpoint("qwen3"), options={}, named=[*names, *stacked, "model.layers.1.x"])
    with safe_open(Path(checkpoint("qwen3"), "model.safetensors"), framework="pt") as file:
        for name in names:
            assert torch.equal(torch.tensor(it["by name"][name]), file.get_tensor(name)[:3].float())
        gate = file.get_tensor("model.layers.1.mlp.gate_proj.weight")[:3].float()
    assert it["by name"][stacked[0]] == it["by name"][names[0]]
    assert torch.equal(torch.tensor(it["by name"][stacked[1]]), gate)
    assert it["by name"]["model.layers.1.x"] is None


#: Modules of SGLang's own models that ours have no module for: functions there, or parts of another module.
SGLANG_ALONE = re.compile(r"act_fn|topk|pooler|rotary_emb|attn_mha|^lm_head$")
#: Modules of ours that theirs have none for: a buffer, and what is told of scales of the cache and of updates. SGLang's
#: own tied head is the embedding itself.
OURS_ALONE = re.compile(r"rotary|cache_scales|update_session|^lm_head$")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Of each model, what ours and SGLang's own are made of."""

    @once
    def of(ours: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("built")
        given, wanted = folder / "folders.json", folder / "names.json"
        given.write_text(json.dumps([str(make(folder, model)) for model in MODELS]))
        path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
        variables = {PACKAGE: "atom_plugin.sglang.models" if ours else None, "PYTHONPATH": path}
        finished = run_script(Path(__file__).with_name("named.py"), [str(given), str(wanted)], variables, 120.0)
        assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
        return dict(zip(MODELS, json.loads(wanted.read_text()), strict=True))

    return of


@pytest.mark.parametrize("model", MODELS)
def test_every_familys_names_are_sglangs(built, model):
    (mine, parameters, modules), (whose, expected, theirs) = built(True)[model], built(False)[model]
    assert mine.startswith("atom_plugin.")
    assert whose.startswith("sglang.")
    assert comparable(parameters) == comparable(expected)
    assert all(parameters[name] == expected[name] for name in set(parameters) & set(expected))
    assert {name for name in comparable(modules) if not OURS_ALONE.search(name)} == {
        name.replace("attn_mqa", "attn") for name in comparable(theirs) if not SGLANG_ALONE.search(name)
    }


every_case = pytest.mark.parametrize(
    "case",
    some((*CASES, *RANKS), (*FIRST, *RANKS[:1])),
    ids=str,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a case, an engine that has saved its weights, and the folder."""

    @once
    def of(case: Case) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("saved")
        old, _ = case.make(folder)
        it = run(
            folder / "it", environ=environ_of(case), model=str(old), options=options_of(case), checks=True, save=True
        )
        return it, folder / "it" / "files" / "shards"

    return of


def environ_of(case: Case) -> dict[str, str]:
    return BOUND if case in RANKS else {}


def options_of(case: Case) -> dict[str, Any]:
    return {**case.options, **({"quantization": case.quantization} if case.quantization else {})}


@every_case
def test_weights_are_saved_by_rank_and_served_again(saved, tmp_path, case):
    before, folder = saved(case)
    assert before["answer then"] == before["answer"]
    options = {**options_of(case), "load_format": "sharded_state"}
    it = run(tmp_path / "it", environ=environ_of(case), model=str(folder), options=options, checks=True, wipes=True)
    assert it["answer"] == before["answer"]
    assert it["checksums"] == before["checksums"]
    for wiped, checksums in zip(it["wiped"], it["checksums"], strict=True):
        assert wiped.keys() == checksums.keys()
        assert all(wiped[name] != checksum for name, checksum in checksums.items())
    assert it["wiped answer"] != it["answer"]


def test_saved_weights_of_another_number_of_ranks_are_refused(saved, tmp_path):
    case, *_ = RANKS
    _, folder = saved(case)
    with pytest.raises(
        AssertionError, match=r"(?s)does not fit Qwen3ForCausalLM: misshapen .*with the number of ranks"
    ):
        run(tmp_path / "it", model=str(folder), options={"load_format": "sharded_state"})


def test_a_folder_without_saved_weights_is_refused(tmp_path):
    with pytest.raises(AssertionError, match=r"qwen3 has no file model-rank-0-part-\*.safetensors"):
        run(tmp_path / "it", model=checkpoint("qwen3"), options={"load_format": "sharded_state"})
