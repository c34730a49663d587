"""Mixtures of experts in real vLLM give Hugging Face's greedy tokens, on one rank and on several; in FP8 our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
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
    make_mxfp4,
    make_quantised_mixture,
    share_alike,
)
from tests.integration.once import once
from tests.integration.vllm.data_parallel import COPIES, greedy_at_once, two_data_parallel_ranks
from tests.integration.vllm.offline import Ask, Engine, Ran, run
from tests.thorough import some
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS
from tests.unit.core.mxfp4_checkpoints import make_quark, quark_mxfp4

pytestmark = pytest.mark.vllm

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
WAYS = {
    "one rank": {},
    "every expert on two ranks": TWO,
    "four experts a rank": {**TWO, "enable_expert_parallel": True},
    "two stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
}
TOKENS = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
FIRST_TOKEN = {"max_tokens": 1, "ignore_eos": True}
FLOAT32 = {"dtype": "float32"}
FLOAT16 = {"dtype": "float16"}
BFLOAT16 = {"dtype": "bfloat16"}
#: Prompts in which drafts are found.
REPEATED = [f"{prompt} {prompt} {prompt}" for prompt in PROMPTS]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

#: By the way in which they run: families in float32; families and forms of FP8; experts in Quark's MXFP4.
IN_FLOAT32 = {
    "one rank": ("gpt_oss", "deepseek_v3"),
    "every expert on two ranks": ("mixtral", "deepseek_v2"),
    "four experts a rank": ("qwen3_moe", "deepseek_v3"),
    "two stages": ("glm4_moe", "deepseek_v3"),
}
IN_FP8 = {
    "one rank": (("mixtral", "quark, tensor, static"),),
    "every expert on two ranks": (("deepseek_v3", "fp8, blocks"),),
    "four experts a rank": (("qwen3_moe", "compressed, blocks"),),
}
IN_MXFP4 = ("one rank", "four experts a rank")


class Engines:
    """The engines of these tests, those that run in the same way one after the other in one process.

    `engines[way, name]` is what one did, and what is expected of it.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self.folder = folder
        self.mixture = once(self.mixture)
        self.ran = once(self.ran)

    def __getitem__(self, key: tuple[str, str]) -> tuple[Ran, Any]:
        way, name = key
        return self.ran(way)[name]

    def mixture(self, family: str) -> tuple[str, list[list[int]]]:
        """The folder of a mixture, and Hugging Face's tokens."""
        folder = self.folder()
        return str(folder), make_mixture(folder, family)

    def ran(self, way: str) -> dict[str, tuple[Ran, Any]]:
        """All that run in one way."""
        names, engines, expected = zip(*self.made(way), strict=True)
        shared = {"max_model_len": 256, **WAYS[way]}
        found = run([replace(engine, options={**shared, **engine.options}) for engine in engines], deadline=560.0)
        return dict(zip(names, zip(found, expected, strict=True), strict=True))

    def made(self, way: str) -> Iterator[tuple[str, Engine, Any]]:
        """Their names, they themselves, and what is expected."""
        for family in IN_FLOAT32[way]:
            folder, expected = self.mixture(family)
            yield family, Engine(folder, "atom", [Ask(PROMPTS, TOKENS), Ask(REPEATED, TOKENS)], FLOAT32), expected
        for family, form in IN_FP8.get(way, ()):
            (chosen,) = (it for it in (*FORMATS, *BLOCK_FORMATS) if it.name == form)
            # In float16 rounding seldom moves a number to the next of e4m3's, and by that a token to another expert.
            fp8, expected = make_fp8_mixture(self.folder(), family, chosen, dtype=torch.float16)
            yield f"{family}, {form}", Engine(str(fp8), "atom", [Ask(list(expected), FIRST_TOKEN)], FLOAT16), expected
        if way in IN_MXFP4:
            # Two ranks sum attention's output in another order, of which activations of four bits would make too much.
            config = quark_mxfp4(rounded_inputs=way == "one rank")
            quantise = partial(make_quark, config=config)
            quark, expected = make_quantised_mixture(self.folder(), "qwen3_moe", quantise, dtype=torch.float16)
            yield "Quark's MXFP4", Engine(str(quark), "atom", [Ask(list(expected), FIRST_TOKEN)], FLOAT16), expected
        if way == "every expert on two ranks":
            folder, expected = self.mixture("deepseek_v2")
            environ = {"ATOM_KERNELS": "shared_experts=routed"}
            unread = {**FLOAT32, "enable_ep_weight_filter": True}  # experts of the other rank
            yield "shared experts", Engine(folder, "atom", [Ask(PROMPTS, TOKENS)], unread, environ), expected
        if way == "one rank":
            yield from self.made_for_one_rank()

    def made_for_one_rank(self) -> Iterator[tuple[str, Engine, Any]]:
        """What runs on one rank alone."""
        folder, expected = self.mixture("gpt_oss")
        environ = {"ATOM_DISABLE_VLLM_ATTENTION": "1"}
        yield "vLLM's attention", Engine(folder, "atom", [Ask(PROMPTS, TOKENS)], FLOAT32, environ), expected
        for name, packed in zip(("MXFP4", "the same numbers"), make_mxfp4(self.folder()), strict=True):
            yield name, Engine(str(packed), "atom", [Ask(PROMPTS, TOKENS)], BFLOAT16), None
        folder, _ = self.mixture("deepseek_v2")
        prompts = [f"{count} birds and" for count in range(24)]
        runner = Runner(Path(folder), cache_dtype=torch.float8_e4m3fn)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        first = {prompt: runner.generate([tokenizer.encode(prompt)], 1)[0][0] for prompt in prompts}
        in_fp8 = {**FLOAT32, "kv_cache_dtype": "fp8"}
        yield "latents in FP8", Engine(folder, "atom", [Ask(prompts, FIRST_TOKEN)], in_fp8), first
        folder, _ = self.mixture("deepseek_v3")
        # The last: where drafts from the prompt have imported Numba, vLLM 0.32 does not start another engine.
        drafts = {**FLOAT32, "speculative_config": NGRAM}
        yield "drafts", Engine(folder, "atom", [Ask(REPEATED, TOKENS)], drafts), None


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Engines:
    """See :class:`Engines`."""
    return Engines(lambda: tmp_path_factory.mktemp("mixture"))


def tokens(ran, ask=0):
    return [answer.tokens for answer in ran.answers[ask]]


def test_tokens_of_a_mixture_are_hugging_faces(tmp_path):
    expected = make_mixture(tmp_path, "qwen3_moe")
    (ran,) = run([Engine(str(tmp_path), "atom", [Ask(PROMPTS, TOKENS)], {**FLOAT32, "max_model_len": 256})])
    assert tokens(ran) == expected


@pytest.mark.parametrize(("way", "family"), [(way, family) for way, names in IN_FLOAT32.items() for family in names])
def test_tokens_are_hugging_faces(way, family, engines):
    ran, expected = engines[way, family]
    assert tokens(ran) == expected


def test_tokens_of_shared_experts_among_the_routed_ones_are_hugging_faces(engines):
    way = "every expert on two ranks"
    (apart, _), (ran, expected) = (engines[way, name] for name in ("deepseek_v2", "shared experts"))
    assert (apart.kernels["shared_experts"], ran.kernels["shared_experts"]) == ("separate", "routed")
    assert tokens(ran) == expected


def test_tokens_on_vllms_attention_are_hugging_faces(engines):
    ran, expected = engines["one rank", "vLLM's attention"]
    assert "FrameworkAttention" in ran.layer_classes
    assert tokens(ran) == expected


def test_drafts_are_verified_over_latents(engines):
    (plain, _), (drafted, _) = (engines["one rank", name] for name in ("deepseek_v3", "drafts"))
    assert drafted.counters["vllm:spec_decode_num_draft_tokens"] > 0
    assert tokens(drafted) == tokens(plain, ask=1)


@pytest.mark.slow
def test_a_cache_of_latents_in_fp8_answers_as_our_model_alone_does(engines):
    ran, expected = engines["one rank", "latents in FP8"]
    assert share_alike(tokens(ran), expected) >= FP8_ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("by_command", some([False, True], [False]))
def test_data_parallel_ranks_that_share_each_expert_give_hugging_faces_tokens(by_command, tmp_path):
    """Those that share out whole experts draft as well: see test_mtp.py. By command it is started as users start it."""
    expected = make_mixture(tmp_path, "gpt_oss")
    with two_data_parallel_ranks(tmp_path, by_command=by_command) as server:
        assert greedy_at_once(server, PROMPTS * COPIES) == expected * COPIES


@pytest.mark.slow
def test_experts_in_mxfp4_answer_as_the_numbers_that_they_stand_for(engines):
    (packed, _), (rounded, _) = (engines["one rank", name] for name in ("MXFP4", "the same numbers"))
    assert tokens(packed) == tokens(rounded)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), [(way, ", ".join(case)) for way, cases in IN_FP8.items() for case in cases])
def test_fp8_experts_answer_as_our_model_alone_does(way, name, engines):
    ran, expected = engines[way, name]
    assert share_alike(tokens(ran), expected) >= FP8_ALIKE
    assert ran.kernels["fp8_experts"] == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("way", IN_MXFP4)
def test_experts_in_quarks_mxfp4_answer_as_our_model_alone_does(way, engines):
    ran, expected = engines[way, "Quark's MXFP4"]
    assert share_alike(tokens(ran), expected) >= FP8_ALIKE
    assert ran.kernels["mxfp4_experts"] == ran.kernels["mxfp4_linear"] == "reference"
