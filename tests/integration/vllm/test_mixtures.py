"""Mixtures of experts in real vLLM give Hugging Face's greedy tokens, on one rank and on several; in FP8 our own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from atom_core.standalone import Runner
from tests.integration.mixtures import (
    FP8_ALIKE,
    NUM_TOKENS,
    PROMPTS,
    make_fp8_mixture,
    make_mixture,
    make_mxfp4,
    make_quantised_mixture,
    share_alike,
)
from tests.integration.questions import connect
from tests.integration.server import VllmServer
from tests.integration.vllm.offline import Ask, Engine, Ran, run
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS
from tests.unit.core.mxfp4_checkpoints import make_quark, quark_mxfp4

pytestmark = pytest.mark.vllm

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
WAYS = {
    "one rank": {},
    "vLLM's attention": {},
    "every expert on two ranks": TWO,
    "four experts a rank": {**TWO, "enable_expert_parallel": True},
    "two stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param("qwen3_moe", "one rank", marks=pytest.mark.smoke),
        ("mixtral", "every expert on two ranks"),
        ("qwen3_moe", "four experts a rank"),
        ("glm4_moe", "two stages"),
        ("gpt_oss", "one rank"),
        ("gpt_oss", "vLLM's attention"),
        ("glm4_moe", "four experts a rank"),
        ("deepseek_v2", "every expert on two ranks"),
        ("deepseek_v3", "one rank"),
        ("deepseek_v3", "four experts a rank"),
        ("deepseek_v3", "two stages"),
    ],
)
def test_tokens_are_hugging_faces(tmp_path, family, way):
    expected = make_mixture(tmp_path, family)
    ask = Ask(PROMPTS, {"max_tokens": NUM_TOKENS, "ignore_eos": True})
    options = {"dtype": "float32", "max_model_len": 256, **WAYS[way]}
    # vLLM gives each rank processor cores of its own, of which there may be fewer than ranks.
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if "distributed_executor_backend" in WAYS[way] else {}
    if way == "vLLM's attention":
        environ["ATOM_DISABLE_VLLM_ATTENTION"] = "1"
    (ran,) = run([Engine(str(tmp_path), "atom", [ask], options)], environ=environ)
    assert [answer.tokens for answer in ran.answers[0]] == expected


def test_drafts_are_verified_over_latents(tmp_path):
    make_mixture(tmp_path, "deepseek_v3")
    prompts = [f"{prompt} {prompt} {prompt}" for prompt in PROMPTS]
    ask = Ask(prompts, {"max_tokens": NUM_TOKENS, "ignore_eos": True})
    options = {"dtype": "float32", "max_model_len": 256}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engines = [
        Engine(str(tmp_path), "atom", [ask], {**options, **more}) for more in ({}, {"speculative_config": drafts})
    ]
    plain, drafted = run(engines)
    assert drafted.counters["vllm:spec_decode_num_draft_tokens"] > 0
    assert [it.tokens for it in drafted.answers[0]] == [it.tokens for it in plain.answers[0]]


@pytest.mark.slow
def test_a_cache_of_latents_in_fp8_answers_as_our_model_alone_does(tmp_path):
    make_mixture(tmp_path, "deepseek_v2")
    prompts = [f"{count} birds and" for count in range(24)]
    runner = Runner(tmp_path, cache_dtype=torch.float8_e4m3fn)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = {prompt: runner.generate([tokenizer.encode(prompt)], 1)[0][0] for prompt in prompts}
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_dtype": "fp8"}
    (ran,) = run([Engine(str(tmp_path), "atom", [Ask(prompts, {"max_tokens": 1, "ignore_eos": True})], options)])
    assert share_alike([answer.tokens for answer in ran.answers[0]], expected) >= FP8_ALIKE


#: Copies of the prompts, so that both replicas have some at the same time, and one of them is done before the other.
COPIES = 3


@pytest.mark.slow
@pytest.mark.parametrize(("family", "flags"), [("qwen3_moe", ("--enable-expert-parallel",)), ("gpt_oss", ())])
def test_replicas_that_share_the_experts_give_hugging_faces_tokens(tmp_path, family, flags):
    expected = make_mixture(tmp_path, family)
    flags = ("--dtype", "float32", "--max-model-len", "256", "--data-parallel-size", "2", *flags)
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with VllmServer(tmp_path, "--model-impl", "atom", *flags, environ=environ) as server:
        client = connect(server)

        def ask(prompt):
            others = {"ignore_eos": True, "return_token_ids": True}
            answer = client.completions.create(
                model=server.model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body=others
            )
            return answer.choices[0].token_ids

        with ThreadPoolExecutor(COPIES * len(PROMPTS)) as pool:
            assert list(pool.map(ask, PROMPTS * COPIES)) == expected * COPIES
        served = [server.metric("vllm:request_success_total", f'engine="{rank}"') for rank in (0, 1)]
        assert min(served) > 0


def test_experts_in_mxfp4_answer_as_the_numbers_that_they_stand_for(tmp_path):
    ask = Ask(PROMPTS, {"max_tokens": NUM_TOKENS, "ignore_eos": True})
    options = {"dtype": "bfloat16", "max_model_len": 256}
    packed, rounded = run([Engine(str(folder), "atom", [ask], options) for folder in make_mxfp4(tmp_path)])
    assert [answer.tokens for answer in packed.answers[0]] == [answer.tokens for answer in rounded.answers[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form", "way"),
    [
        ("qwen3_moe", "compressed, blocks", "four experts a rank"),
        ("mixtral", "fp8, dynamic", "one rank"),
        ("deepseek_v3", "fp8, blocks", "every expert on two ranks"),
    ],
)
def test_fp8_experts_answer_as_our_model_alone_does(tmp_path, family, form, way):
    (chosen,) = (it for it in (*FORMATS, *BLOCK_FORMATS) if it.name == form)
    folder, expected = make_fp8_mixture(tmp_path, family, chosen)
    ask = Ask(list(expected), {"max_tokens": 1, "ignore_eos": True})
    options = {"dtype": "bfloat16", "max_model_len": 256, **WAYS[way]}
    ran = _run(Engine(str(folder), "atom", [ask], options), two=way != "one rank")
    assert share_alike([answer.tokens for answer in ran.answers[0]], expected) >= FP8_ALIKE
    assert ran.kernels["fp8_experts"] == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one rank", "four experts a rank"])
def test_experts_in_quarks_mxfp4_answer_as_our_model_alone_does(tmp_path, way):
    # Two ranks sum attention's output in another order, of which activations of four bits would make too much.
    config = quark_mxfp4(rounded_inputs=way == "one rank")
    folder, expected = make_quantised_mixture(tmp_path, "qwen3_moe", partial(make_quark, config=config))
    ask = Ask(list(expected), {"max_tokens": 1, "ignore_eos": True})
    options = {"dtype": "bfloat16", "max_model_len": 256, **WAYS[way]}
    ran = _run(Engine(str(folder), "atom", [ask], options), two=way != "one rank")
    assert share_alike([answer.tokens for answer in ran.answers[0]], expected) >= FP8_ALIKE
    assert ran.kernels["mxfp4_experts"] == ran.kernels["mxfp4_linear"] == "reference"


def _run(engine: Engine, two: bool) -> Ran:
    # vLLM gives each rank processor cores of its own, of which there may be fewer than ranks.
    return run([engine], environ={"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if two else {})[0]
