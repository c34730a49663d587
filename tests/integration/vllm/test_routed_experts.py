"""`--enable-return-routed-experts`: the experts that our routers chose, token by token, are those of vLLM's own models.

vLLM hands them on in its newer model runner, which wants Triton: `triton_on_cpu` has its kernels interpreted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mixtures import FAMILIES, PROMPTS, make_mixture
from tests.integration.vllm.offline import Answer, Ask, Engine, Ran, run
from tests.thorough import some

pytestmark = pytest.mark.vllm

ENVIRON = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("triton_on_cpu")), os.environ.get("PYTHONPATH", "")]),
    "TRITON_INTERPRET": "1",
    "TRITON_BACKENDS_IN_TREE": "0",  # as it is by default, and told apart from processes without that back end
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
#: The last prompt is longer than a page of 128 tokens, and comes from the cache the second time.
ASK = Ask([f"{prompt} {prompt}" * 3 for prompt in PROMPTS], {"max_tokens": 12, "ignore_eos": True})
OPTIONS = {"dtype": "float32", "enable_return_routed_experts": True, "enforce_eager": True, "max_model_len": 256}
#: vLLM's own GPT-OSS wants the defaults of its rope stated.
ROPE = {**FAMILIES["gpt_oss"]["rope_parameters"], "beta_fast": 32.0, "beta_slow": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {"gpt_oss": {"rope_parameters": ROPE}}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
#: By family: further options of our model, and what is set while it is made. On a CPU vLLM caches no prefixes of
#: DeepSeek models, without which it hands no experts on.
WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "qwen3_moe": ({**TWO, "enable_expert_parallel": True}, {}),
    "mixtral": (TWO, {}),
    "gpt_oss": ({"max_num_batched_tokens": 32, "max_num_seqs": 8}, {}),
    "glm4_moe": ({}, {"ATOM_KERNELS": "shared_experts=routed"}),
}


def answers(ran: Ran) -> list[Answer]:
    return [answer for asked in ran.answers for answer in asked]


def experts(ran: Ran) -> list[list[list[list[int]]]]:
    """By answer, token and layer, in ascending order."""
    return [[[sorted(layer) for layer in token] for token in answer.routed_experts or ()] for answer in answers(ran)]


@pytest.mark.parametrize("family", some(WAYS, ("qwen3_moe", "gpt_oss", "glm4_moe")))
def test_they_are_those_of_vllms_own_model(tmp_path, family):
    make_mixture(tmp_path, family, **SETTINGS.get(family, {}))
    options, environ = WAYS[family]
    engines = [Engine(str(tmp_path), impl, [ASK, ASK], OPTIONS) for impl in ("auto", "atom")]
    native, *ours = run(
        [*engines, Engine(str(tmp_path), "atom", [ASK, ASK], {**OPTIONS, **options}, environ)], environ=ENVIRON
    )
    assert not native.model_class.startswith("Atom")
    expected = experts(native)
    # Of every token but the last new one.
    assert all(len(chosen) > len(answer.tokens) for chosen, answer in zip(expected, answers(native), strict=True))
    assert len({str(layer) for chosen in expected for token in chosen for layer in token}) > 8
    for ran in ours:
        assert ran.model_class.startswith("Atom")
        assert [it.tokens for it in answers(ran)] == [it.tokens for it in answers(native)]
        assert experts(ran) == expected
        assert ran.counters["vllm:prefix_cache_hits"] > 0
    if environ:
        assert [it.kernels["shared_experts"] for it in ours] == ["separate", "routed"]
