"""The experts that our routers chose reach SGLang's requests and its recorder, as those of its own mixtures do.

They are Hugging Face's. SGLang's own mixtures give no numbers on a CPU: of theirs the first layer's choice is right.
SGLang pins memory for what it keeps, also on a CPU; `pinned_on_cpu` has it do without. It counts on an accelerator;
`recorded_on_cpu` has it take the CPU for one.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.isolation import before_all_else
from tests.integration.mixtures import PROMPTS, make_drafting, make_mixture
from tests.integration.server import SglangServer, free_ports
from tests.integration.sglang.offline import Answer, Ask, Engine, Ran, drafting, run
from tests.integration.sglang.test_dp_attention import DERIVED, DRAFTING
from tests.integration.sglang.test_mixtures import BOUND
from tests.thorough import some
from tests.unit.core.hugging_face import routed_experts

pytestmark = pytest.mark.sglang

FOLDER = Path(__file__).parent
ENVIRON = before_all_else(FOLDER / "stand_ins", FOLDER / "pinned_on_cpu")
COUNTING = before_all_else(FOLDER / "recorded_on_cpu")
NUM_LAYERS, TOP_K, NUM_EXPERTS = 3, 2, 8
ASK = Ask(
    [f"{prompt} {prompt}" * 2 for prompt in PROMPTS],
    {"max_new_tokens": 8, "ignore_eos": True},
    {"return_routed_experts": True},
)
OPTIONS = {"dtype": "float32", "enable_return_routed_experts": True}
TWO = {"tp_size": 2}
WHOLE = {**TWO, "ep_size": 2}
#: By family: further options, and what is set.
WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "qwen3_moe": ({**WHOLE, "attn_dp_size": 2}, BOUND),
    "mixtral": (TWO, BOUND),
    "gpt_oss": ({"page_size": 4, "chunked_prefill_size": 16}, {}),
    "glm4_moe": (WHOLE, BOUND),
    "deepseek_v2": ({}, {"ATOM_KERNELS": "shared_experts=routed"}),
    "deepseek_v3": ({"page_size": 4, "chunked_prefill_size": 16}, {}),
}


class Routers:
    """Hugging Face's, of the model in a folder."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def choose(self, prompt: str, new_tokens: list[int]) -> dict[int, list[list[int]]]:
        """By layer, those of each token but the last new one, from which nothing was computed."""
        return routed_experts(self.model, [*self.tokenizer.encode(prompt), *new_tokens[:-1]])


def chosen(answer: Answer, layers: int = NUM_LAYERS) -> np.ndarray:
    """`[T, layers, k]`, in ascending order."""
    content = base64.b64decode(answer.meta["routed_experts"])
    return np.sort(np.frombuffer(content, dtype=np.int32).reshape(-1, layers, TOP_K))


def check(ran: Ran, routers: Routers) -> None:
    """Whether all answers have the right experts; the second time from the cache."""
    assert "atom-plugin serves" in ran.log
    for answers in ran.answers:
        for prompt, answer in zip(ASK.prompts, answers, strict=True):
            expected, found = routers.choose(prompt, answer.tokens), chosen(answer)
            for layer in range(NUM_LAYERS):
                assert found[:, layer].tolist() == expected.get(layer, [[0] * TOP_K] * len(found))


@pytest.mark.parametrize("family", some(WAYS, ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")))
def test_a_request_is_given_those_of_its_tokens(tmp_path, family):
    make_mixture(tmp_path, family)
    further, environ = WAYS[family]
    engines = [Engine(str(tmp_path), True, [ASK, ASK], OPTIONS)]
    engines += [Engine(str(tmp_path), True, [ASK, ASK], {**OPTIONS, **further, "port": free_ports(DERIVED)}, environ)]
    routers = Routers(tmp_path)
    for ran in run(engines, environ=ENVIRON):
        check(ran, routers)
    # With two data-parallel ranks a prompt may go to the other one the second time.
    if "attn_dp_size" not in further:
        assert all(answer.meta["cached_tokens"] > 0 for answer in ran.answers[1])


def test_a_draft_that_is_a_mixture_too_leaves_the_targets_alone(tmp_path):
    make_drafting(tmp_path)
    options = drafting(1, **OPTIONS, disable_cuda_graph=True)
    (ran,) = run([Engine(str(tmp_path), True, [ASK], options)], environ=DRAFTING)
    model = Routers(tmp_path)
    for prompt, answer in zip(ASK.prompts, ran.answers[0], strict=True):
        found, expected = chosen(answer), model.choose(prompt, answer.tokens)
        for layer, experts in expected.items():
            assert found[:, layer].tolist() == experts


def test_the_first_layers_are_those_of_sglangs_own_mixtures(tmp_path):
    make_mixture(tmp_path, "qwen3_moe")
    native, ours = run([Engine(str(tmp_path), own, [ASK], OPTIONS) for own in (False, True)], environ=ENVIRON)
    assert "atom-plugin serves" not in native.log
    for theirs, answer, prompt in zip(native.answers[0], ours.answers[0], ASK.prompts, strict=True):
        # The new tokens behind a prompt differ.
        length = len(Routers(tmp_path).tokenizer.encode(prompt))
        assert chosen(theirs)[:length, 0].tolist() == chosen(answer)[:length, 0].tolist()


def post(server: SglangServer, path: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        content = answer.read().decode()
        return json.loads(content) if body is not None else content


def record(server: SglangServer, folder: Path, prompt: str, other: str) -> tuple[Any, list[int]]:
    """What ``server`` has written to ``folder`` of one prompt and not of the next, and the tokens it answered with."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    post(server, "/start_expert_distribution_record")
    tokens = post(server, "/generate", {"text": prompt, "sampling_params": sampling})["output_ids"]
    post(server, "/stop_expert_distribution_record")
    post(server, "/generate", {"text": other, "sampling_params": sampling})
    post(server, "/dump_expert_distribution_record")
    server.wait_for(lambda: bool(list(folder.glob("*.pt"))), "a dump")
    (written,) = folder.glob("*.pt")
    return torch.load(written, weights_only=True, map_location="cpu"), tokens


def counts_of(found: Any, mode: str) -> torch.Tensor:
    """How often each expert was chosen, ``[layers, experts]``."""
    if mode == "stat":
        return found["logical_count"].sum(0)
    return torch.stack([it["global_physical_count"] for it in found["records"]]).sum(0)


def recorded(folder: Path, model: Path, mode: str, *flags: str, **environ: str) -> tuple[Any, list[int]]:
    """What a server has written of one request, and the tokens that it answered with."""
    flags = ("--expert-distribution-recorder-mode", mode, "--dtype", "float32", "--sleep-on-idle", *flags)
    environ = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder), **COUNTING, **environ}
    with SglangServer(model, *flags, "--max-total-tokens", "4096", environ=environ) as server:
        return record(server, folder, PROMPTS[2], PROMPTS[0])


@pytest.mark.parametrize(
    "mode", ["stat", pytest.param("per_pass", marks=[pytest.mark.slow, pytest.mark.thorough]), "per_token"]
)
def test_the_recorder_counts_them_between_start_and_stop(tmp_path, mode):
    model, dumps = tmp_path / "model", tmp_path / "dumps"
    for folder in (model, dumps):
        folder.mkdir()
    make_mixture(model, "glm4_moe")
    found, tokens = recorded(dumps, model, mode)
    expected = Routers(model).choose(PROMPTS[2], tokens)
    counts = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64)
    for layer, experts in expected.items():
        counts[layer] = torch.bincount(torch.tensor(experts).flatten(), minlength=NUM_EXPERTS)
    assert counts_of(found, mode).tolist() == counts.tolist()
    if mode == "per_token":
        first = found["records"][0]["topk_ids_of_layer"][..., :TOP_K].sort(-1).values
        for layer, experts in expected.items():
            assert first[layer].tolist() == experts[: first.shape[1]]
