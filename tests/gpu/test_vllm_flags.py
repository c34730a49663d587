"""vLLM on a GPU: flags that act inside the model, under captured graphs.

Each engine has a process of its own, all at once: a start is mostly host work.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.gpu.routed import ALIKE, MIXTURES, PROMPTS, share_alike
from tests.gpu.vllm_engines import engine
from tests.integration.vllm.offline import Ask, Ran, run
from tests.integration.vllm.test_float32_head import (
    ASKS,
    FLOAT32,
    ROUNDING,
    SIXTEEN_BITS,
    are_rounded,
    distance,
)

RAW = {"logprobs_mode": "raw_logits"}
#: Tied, not tied, of experts, of latents.
HEADS = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
ROUTED = {"enable_return_routed_experts": True}
#: The second time from the prefix cache.
ROUTED_ASKS = [Ask(PROMPTS, {"max_tokens": 12, "ignore_eos": True})] * 2

Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    options = {"rounded": RAW, "float32": {**RAW, **FLOAT32}, "routed": ROUTED}
    keys = [(family, "atom", way) for family in HEADS for way in ("rounded", "float32")]
    keys += [(family, "auto", "float32") for family in HEADS if family != "deepseek_v3"]
    keys += [(family, "atom", "routed") for family in MIXTURES] + [("qwen3_moe", "auto", "routed")]
    pool = ThreadPoolExecutor(8)

    def start(key: Key) -> Ran:
        family, impl, way = key
        asks = ROUTED_ASKS if way == "routed" else ASKS
        return run([engine(family, impl, options[way], asks)], deadline=540.0)[0]

    return {key: pool.submit(start, key) for key in keys}


@pytest.mark.parametrize("family", HEADS)
def test_logits_of_a_head_in_float32_are_not_rounded(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    rounded, wide = (engines[family, "atom", way].result() for way in ("rounded", "float32"))
    assert wide.model_class.startswith("Atom")
    assert wide.graph_mode == "FULL_AND_PIECEWISE"
    assert are_rounded(rounded)
    assert not are_rounded(wide)
    assert distance(wide, rounded) <= ROUNDING * 1.01
    assert [it.tokens for it in wide.answers[1]] == [it.tokens for it in wide.answers[0]]


@pytest.mark.parametrize("family", [it for it in HEADS if it != "deepseek_v3"])
def test_logits_of_a_head_in_float32_are_close_to_vllms_own(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    native, ours = (engines[family, impl, "float32"].result() for impl in ("auto", "atom"))
    assert not are_rounded(native)
    assert distance(ours, native) <= SIXTEEN_BITS


def _share(family: str, ran: Ran) -> float:
    pairs = [pair for asked in ran.answers for pair in zip(PROMPTS, asked, strict=True)]
    return share_alike(family, [(prompt, it.tokens, it.routed_experts or []) for prompt, it in pairs])


@pytest.mark.parametrize("family", MIXTURES)
def test_routed_experts_are_those_of_the_routers(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    ran = engines[family, "atom", "routed"].result()
    assert ran.model_class.startswith("Atom")
    assert ran.graph_mode != "NONE"
    assert ran.counters["vllm:prefix_cache_hits"] > 0
    assert _share(family, ran) >= ALIKE


def test_vllms_own_tell_the_same_experts(engines: Mapping[Key, Future[Ran]]) -> None:
    assert _share("qwen3_moe", engines["qwen3_moe", "auto", "routed"].result()) >= ALIKE
