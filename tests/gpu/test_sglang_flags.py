"""SGLang on a GPU: flags that act inside the model, under captured graphs; dumps and hooks of modules by name.

Each engine has processes of its own, a few at once: a start is mostly host work.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gpu.routed import ALIKE, MIXTURES, PROMPTS, share_alike
from tests.integration.preloaded import run_script
from tests.integration.questions import checkpoint
from tests.integration.server import SglangServer
from tests.integration.sglang.offline import PACKAGE, Ask, Engine, Ran, run
from tests.integration.sglang.test_float32_head import (
    ASKS,
    FLOAT16,
    FLOAT32,
    ROUNDING,
    SIXTEEN_BITS,
    are_rounded,
    distance,
)
from tests.integration.sglang.test_names import DENSE, LAYER, OF_ALL, OF_LAYER, passes_of
from tests.integration.sglang.test_routed_experts import counts_of, record
from tests.unit.core.hugging_face import routed_experts

#: A stated pool: measuring what is free makes no sense while others start on it.
SHARED = {
    "device": "cuda",
    "sampling_backend": "pytorch",
    "context_length": 512,
    "max_running_requests": 8,
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.9,
}
TRITON = {"attention_backend": "triton"}
ROUTED = {"enable_return_routed_experts": True}
#: The second time from the prefix cache.
ROUTED_ASKS = [Ask(PROMPTS, {"max_new_tokens": 12, "ignore_eos": True}, {"return_routed_experts": True})] * 2
#: Largest difference of a dumped tensor from SGLang's own, as a share of its largest number.
SIXTEEN_BITS_OF_TENSORS = 0.05

HOOKED = (*OF_ALL, *(f"{LAYER}.{name}" for name in (*OF_LAYER, *DENSE)))

Key = tuple[str, bool, str]


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    options = {"rounded": FLOAT16, "float32": {**FLOAT16, **FLOAT32}, "routed": ROUTED}
    keys: list[Key] = [("qwen3", False, "float32"), ("qwen3", True, "rounded"), ("qwen3", True, "float32")]
    keys += [("deepseek_v3", True, "float32")] + [(family, True, "routed") for family in MIXTURES]
    pool = ThreadPoolExecutor(5)

    def start(index: int, key: Key) -> Ran:
        family, ours, way = key
        given = {**SHARED, **({} if ours else TRITON), **options[way], "port": 33000 + 200 * index}
        asks = ROUTED_ASKS if way == "routed" else ASKS
        return run([Engine(checkpoint(family), ours, asks, given)], deadline=540.0)[0]

    return {key: pool.submit(start, index, key) for index, key in enumerate(keys)}


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_logits_of_a_head_in_float32_are_not_rounded(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    ran = engines[family, True, "float32"].result()
    assert "atom-plugin serves" in ran.log
    assert not are_rounded(ran)


def test_logits_of_a_head_in_float32_are_those_that_were_rounded(engines: Mapping[Key, Future[Ran]]) -> None:
    rounded, wide = (engines["qwen3", True, way].result() for way in ("rounded", "float32"))
    assert are_rounded(rounded)
    assert distance(wide, rounded) <= 2 * ROUNDING


def test_logits_of_a_head_in_float32_are_close_to_sglangs_own(engines: Mapping[Key, Future[Ran]]) -> None:
    native, ours = (engines["qwen3", it, "float32"].result() for it in (False, True))
    assert "atom-plugin serves" not in native.log
    assert not are_rounded(native)
    assert distance(ours, native) <= SIXTEEN_BITS


def _share(family: str, ran: Ran) -> float:
    config = json.loads(Path(checkpoint(family), "config.json").read_text())
    shape = (-1, config["num_hidden_layers"], config["num_experts_per_tok"])
    answers = []
    for asked in ran.answers:
        for prompt, it in zip(PROMPTS, asked, strict=True):
            told = np.frombuffer(base64.b64decode(it.meta["routed_experts"]), dtype=np.int32)
            answers.append((prompt, it.tokens, told.reshape(shape).tolist()))
    return share_alike(family, answers)


@pytest.mark.parametrize("family", MIXTURES)
def test_routed_experts_are_those_of_the_routers(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    ran = engines[family, True, "routed"].result()
    assert "atom-plugin serves" in ran.log
    assert all(it.meta["cached_tokens"] > 0 for it in ran.answers[1])
    assert _share(family, ran) >= ALIKE


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_the_recorder_counts_experts_between_start_and_stop(tmp_path: Path, mode: str) -> None:
    family, environ = "glm4_moe", {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(tmp_path)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHARED.items()]
    flags += [f"--expert-distribution-recorder-mode={mode}"]
    with SglangServer(checkpoint(family), *flags, environ=environ) as server:
        found, tokens = record(server, tmp_path, PROMPTS[1], PROMPTS[0])
    counts = counts_of(found, mode)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(checkpoint(family)).encode(PROMPTS[1])
    for layer, experts in routed_experts(model, [*prompt, *tokens[:-1]]).items():
        wanted = torch.bincount(torch.tensor(experts).flatten(), minlength=counts.shape[1])
        assert counts[layer].sum() == wanted.sum()
        assert (counts[layer] - wanted).abs().sum() <= 2 * (1 - ALIKE) * wanted.sum() + 2


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Future[dict[str, Any]]]:
    """A dense model with hooks and dumps, ours and SGLang's own."""

    def start(ours: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("side")
        given, wanted = folder / "case.json", folder / "found.json"
        options = {**SHARED, **({} if ours else TRITON), "port": 35000 + 200 * ours}
        case = {"folder": str(folder / "files"), "model": checkpoint("qwen3"), "options": options}
        given.write_text(json.dumps({**case, "hooked": HOOKED, "dumps": True, "checks": True}))
        variables = {PACKAGE: "atom_plugin.sglang.models" if ours else None}
        script = Path(__file__).parents[1] / "integration" / "sglang" / "looked_at.py"
        finished = run_script(script, [str(given), str(wanted)], variables, 400.0)
        assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
        return {**json.loads(wanted.read_text()), "passes": passes_of(folder / "files" / "dumps")}

    pool = ThreadPoolExecutor(2)
    return {ours: pool.submit(start, ours) for ours in (False, True)}


def test_hooks_see_tensors_of_modules_by_their_names(looked_at: Mapping[bool, Future[dict[str, Any]]]) -> None:
    assert set(looked_at[True].result()["fired"]) == set(HOOKED)


def test_dumps_are_of_every_layer_and_finite(looked_at: Mapping[bool, Future[dict[str, Any]]]) -> None:
    first, *_ = looked_at[True].result()["passes"]
    assert {f"model.layers.{layer}.mlp.down_proj" for layer in range(5)} <= set(first)
    for dumped in first.values():
        assert all(it.isfinite().all() for it in (dumped if isinstance(dumped, list) else [dumped]))


def test_weights_are_compared_with_a_snapshot(looked_at: Mapping[bool, Future[dict[str, Any]]]) -> None:
    assert [it[0] for it in looked_at[True].result()["compared"]] == [True, True]


def test_dumps_are_close_to_sglangs(looked_at: Mapping[bool, Future[dict[str, Any]]]) -> None:
    ours, native = (looked_at[it].result()["passes"] for it in (True, False))
    compared = 0
    for one, other in zip(ours[:3], native[:3], strict=True):
        for name in set(one) & set(other):
            found, expected = (it if isinstance(it, list) else [it] for it in (one[name], other[name]))
            for tensor, wanted in zip(found, expected, strict=False):
                far = (tensor.float() - wanted.float()).abs().max()
                assert far <= SIXTEEN_BITS_OF_TENSORS * wanted.float().abs().max(), name
                compared += 1
    assert compared > 30


def test_checksums_are_sglangs(looked_at: Mapping[bool, Future[dict[str, Any]]]) -> None:
    ours, native = (looked_at[it].result() for it in (True, False))
    assert ours["checksums"] == native["checksums"]
