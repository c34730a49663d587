"""Greedy tokens are those of Hugging Face's model, for every family and on every path through our code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from atom_core.kernels import OPS
from tests.integration.once import once
from tests.integration.questions import BY_VECTORS, FAMILIES, checkpoint, right_tokens
from tests.integration.sglang.offline import Ask, Engine, Ran, run

pytestmark = pytest.mark.sglang

NUM_FEW = 64
CHUNK = 64
REFERENCE_KERNELS = ",".join(f"{op.name}={op.implementations[-1].name}" for op in OPS)
# On a CPU each rank needs cores of its own.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
#: Families that run on every path, and how large a page may be.
PAGE_SIZES = {"qwen3": 64, "mistral": 1024}


@pytest.fixture(scope="module")
def ran(rows) -> Callable[[str], dict[str, Ran]]:
    """Every engine of a family that the tests look at, by name: one after the other."""
    prompts = [row.prompt for row in rows]
    few = [Ask(prompts[:NUM_FEW])]

    @once
    def ran(family: str) -> dict[str, Ran]:
        def ours(asks: list[Ask] = few, environ: Mapping[str, str] | None = None, **options: Any) -> Engine:
            return Engine(checkpoint(family), True, asks, options, environ or {})

        engines = {"as it comes": ours([Ask(prompts), *few])}
        if family in PAGE_SIZES:
            engines |= {
                "mixed chunks": ours(page_size=16, chunked_prefill_size=CHUNK, enable_mixed_chunk=True),
                "large pages": ours(
                    page_size=PAGE_SIZES[family], disable_radix_cache=True, disable_overlap_schedule=True
                ),
                "SGLang's attention": ours(attention_backend="torch_native"),
                "reference kernels": ours(environ={"ATOM_KERNELS": REFERENCE_KERNELS}, **BY_VECTORS),
            }
        if family == "qwen3":
            engines |= {"two ranks": ours(environ=BOUND, tp_size=2), "two stages": ours(environ=BOUND, pp_size=2)}
        return dict(zip(engines, run(list(engines.values())), strict=True))

    return ran


@pytest.fixture(scope="module")
def expected(hugging_face, rows):
    """Hugging Face's tokens for the first questions, by family."""

    @once
    def expected(family: str) -> list[list[int]]:
        few = rows[:NUM_FEW]
        right = right_tokens(family, few)
        model = hugging_face(family)
        return [model.greedy_along(row.prompt, answer) for row, answer in zip(few, right, strict=True)]

    return expected


def tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_held_out_question_is_answered_right_also_from_the_prefix_cache(family, ran, expected, rows):
    found = ran(family)["as it comes"]
    assert f"atom-plugin serves {checkpoint(family)}" in found.log
    assert "attention  SglangRadixAttention" in found.log
    first, again = found.answers
    assert [answer.text for answer in first] == [f" {row.answer}\n" for row in rows]
    assert tokens(first) == right_tokens(family, rows)
    assert tokens(first[:NUM_FEW]) == tokens(again) == expected(family)
    assert all(answer.meta["cached_tokens"] == answer.meta["prompt_tokens"] - 1 for answer in again)


@pytest.mark.slow
@pytest.mark.parametrize("family", PAGE_SIZES)
def test_pages_and_chunks_give_the_same_tokens(family, ran, expected):
    chunked, paged = (ran(family)[name] for name in ("mixed chunks", "large pages"))
    assert tokens(chunked.answers[0]) == expected(family)
    assert f"#new-token: {CHUNK}," in chunked.log
    assert tokens(paged.answers[0]) == expected(family)
    assert not any(answer.meta["cached_tokens"] for answer in paged.answers[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", PAGE_SIZES)
def test_sglangs_attention_and_reference_kernels_give_the_same_tokens(family, ran, expected):
    framework, reference = (ran(family)[name] for name in ("SGLang's attention", "reference kernels"))
    assert "attention  FrameworkAttention" in framework.log
    assert tokens(framework.answers[0]) == expected(family)
    assert "attention  SglangRadixAttention" in reference.log
    assert reference.log.count("forced by ATOM_KERNELS") >= 5
    assert tokens(reference.answers[0]) == expected(family)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two ranks", "two stages"])
def test_two_processes_give_the_tokens_of_one(name, ran, expected):
    found = ran("qwen3")[name]
    assert "attention  SglangRadixAttention" in found.log
    assert tokens(found.answers[0]) == expected("qwen3")
