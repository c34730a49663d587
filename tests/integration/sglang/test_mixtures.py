"""Mixtures of experts in real SGLang give Hugging Face's greedy tokens, on one rank and on two; in FP8 our own."""

from __future__ import annotations

from typing import Any

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
    share_alike,
)
from tests.integration.sglang.offline import Ask, Engine, run
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS

pytestmark = pytest.mark.sglang

#: One rank; every expert on two ranks; four experts a rank.
ONE: dict[str, Any] = {}
PARTS: dict[str, Any] = {"tp_size": 2}
WHOLE = {"tp_size": 2, "ep_size": 2}
#: SGLang lists the backends that GPT-OSS may be run on.
NAMED = {**PARTS, "attention_backend": "atom"}
#: Prompts in chunks, of which later ones look back at pages.
CHUNKS = {"page_size": 4, "chunked_prefill_size": 4}
ENGINES = {
    "qwen3_moe": (ONE, WHOLE),
    "mixtral": (PARTS,),
    "glm4_moe": (WHOLE,),
    "gpt_oss": (ONE, NAMED, WHOLE),
    "deepseek_v2": (PARTS,),
    "deepseek_v3": (CHUNKS, WHOLE),
}
FP8_ENGINES = (
    ("qwen3_moe", "fp8, blocks", {}),
    ("mixtral", "fp8, dynamic", {"tp_size": 2}),
    ("qwen3_moe", "compressed, channel, dynamic", {"tp_size": 2, "ep_size": 2}),
    ("deepseek_v3", "fp8, blocks", {}),
)
#: Families that also run with their shared experts among the routed ones, as on a GPU.
SHARED, ROUTED = ("deepseek_v2",), {"ATOM_KERNELS": "shared_experts=routed"}
#: SGLang gives each rank a memory node of its own unless it is told which processor cores it has.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("family", ENGINES)
def test_tokens_are_hugging_faces(tmp_path, family):
    expected = make_mixture(tmp_path, family)
    ask = Ask(PROMPTS, {"max_new_tokens": NUM_TOKENS, "ignore_eos": True})
    engines = [
        Engine(str(tmp_path), True, [ask], {"dtype": "float32", **options}, BOUND if "tp_size" in options else {})
        for options in ENGINES[family]
    ]
    if family in SHARED:
        engines.append(Engine(str(tmp_path), True, [ask], {"dtype": "float32"}, ROUTED))
    for engine, ran in zip(engines, run(engines), strict=True):
        assert [answer.tokens for answer in ran.answers[0]] == expected, engine.options
        assert "atom-plugin serves" in ran.log


@pytest.mark.slow
def test_a_cache_of_latents_in_fp8_answers_as_our_model_alone_does(tmp_path):
    make_mixture(tmp_path, "deepseek_v2")
    prompts = [f"{count} birds and" for count in range(24)]
    runner = Runner(tmp_path, cache_dtype=torch.float8_e4m3fn)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = {prompt: runner.generate([tokenizer.encode(prompt)], 1)[0][0] for prompt in prompts}
    ask = Ask(prompts, {"max_new_tokens": 1, "ignore_eos": True})
    (ran,) = run([Engine(str(tmp_path), True, [ask], {"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"})])
    assert share_alike([answer.tokens for answer in ran.answers[0]], expected) >= FP8_ALIKE


@pytest.mark.slow
def test_fp8_experts_answer_as_our_model_alone_does(tmp_path):
    forms = {form.name: form for form in (*FORMATS, *BLOCK_FORMATS)}
    made = [
        make_fp8_mixture(tmp_path / family / form, family, forms[form], dtype=torch.float16)
        for family, form, _ in FP8_ENGINES
    ]
    one = {"max_new_tokens": 1, "ignore_eos": True}
    engines = [
        Engine(str(folder), True, [Ask(list(expected), one)], {"dtype": "float16", **options}, BOUND if options else {})
        for (folder, expected), (*_, options) in zip(made, FP8_ENGINES, strict=True)
    ]
    for (_, expected), case, ran in zip(made, FP8_ENGINES, run(engines), strict=True):
        assert share_alike([answer.tokens for answer in ran.answers[0]], expected) >= FP8_ALIKE, case
        assert f"{'fp8_experts':20}reference" in ran.log
