"""vLLM on a GPU, prompts of thousands of tokens: as near to float32 as vLLM's own model in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from atom_core.kernels.attention.long_prompts import LONG_PROMPT
from tests.gpu.vllm_engines import engine, held_out
from tests.integration.vllm.offline import Ask, Ran, run

#: Prompts in a row: how many, up to nearly as many tokens as the model has positions, or is told to have.
LONG: Mapping[str, tuple[int, dict[str, Any]]] = {
    "2k": (8, {"max_model_len": 2048}),
    "8k": (31, {"max_model_len": 8192, "hf_overrides": {"max_position_embeddings": 8192}}),
}
#: Ours, and vLLM's own model: as it is, in float32, and op by op. Uncompiled it rounds after each op, as the models
#: define bfloat16.
OURS, NATIVE, EXACT, BY_OP = "ours", "native", "in float32", "op by op"
#: Log-probabilities of a prompt's tokens may be so many times as far from float32's as op by op, root mean square over
#: all tokens: which of the two is luckier at one is chance.
AS_EXACT = 1.1

Key = tuple[str, str]


def _ask_at_length(count: int) -> Ask:
    prompts = [row["prompt"] for row in held_out()]
    joined = ["\n\n".join(prompts[at : at + count]) for at in range(0, 100, 5)]
    return Ask(joined, {"max_tokens": 8, "logprobs": 2, "prompt_logprobs": 0})


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    pool = ThreadPoolExecutor(8)

    def start(length: str, how: str) -> Ran:
        count, options = LONG[length]
        options = {**options, "dtype": "float32" if how == EXACT else "bfloat16", "enforce_eager": how == BY_OP}
        asked = engine("qwen3", "atom" if how == OURS else "auto", options, [_ask_at_length(count)])
        return run([asked], deadline=540.0)[0]

    return {(length, how): pool.submit(start, length, how) for length in LONG for how in (OURS, NATIVE, EXACT, BY_OP)}


def _errors(ran: Ran, exact: Ran) -> list[float]:
    """By how much the log-probabilities of the prompts' tokens differ from float32's."""
    pairs = [
        (found, wanted)
        for ours, theirs in zip(ran.answers[0], exact.answers[0], strict=True)
        for found, wanted in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
    ]
    return [abs(found[token] - wanted[token]) for found, wanted in pairs for token in found.keys() & wanted.keys()]


def _margins(ran: Ran, exact: Ran) -> list[float]:
    """By how much float32 prefers its own token where an answer first parts from its, in log-probability."""
    margins = []
    for ours, theirs in zip(ran.answers[0], exact.answers[0], strict=True):
        for mine, other, likely in zip(ours.tokens, theirs.tokens, theirs.logprobs, strict=True):
            if mine != other:
                first, second = sorted(likely.values(), reverse=True)[:2]
                margins.append(first - second)
                break
    return margins


@pytest.mark.parametrize("length", LONG)
def test_long_prompts_get_the_tokens_of_float32_but_for_the_noise_of_bfloat16(
    engines: Mapping[Key, Future[Ran]], length: str
) -> None:
    """The noise is native's, on the same prompts: each of two tokens may be off by as much as it is at its worst."""
    ours, native = (engines[length, how].result() for how in (OURS, NATIVE))
    exact, by_op = (engines[length, how].result() for how in (EXACT, BY_OP))
    assert ours.model_class == "AtomQwen3ForCausalLM"
    errors, noise, most = _errors(ours, exact), _errors(native, exact), _errors(by_op, exact)
    margins = _margins(ours, exact)
    found = (
        f"{_rms(errors):.4f}; native {_rms(noise):.4f}, {max(noise):.3f} at most, {_rms(most):.4f} op by op; {margins}"
    )
    assert _rms(errors) <= AS_EXACT * _rms(most), found
    assert max(margins, default=0.0) <= 2 * max(noise), found


def test_prompts_of_a_model_with_sinks_are_as_exact_by_flash_attention_3_as_by_our_kernel() -> None:
    """Beside the same model in float32, which our kernel alone runs. Its experts make bfloat16's noise large."""
    count, options = LONG["8k"]
    ways = [("bfloat16", None), ("bfloat16", "attention=triton"), ("float32", None)]
    with ThreadPoolExecutor(len(ways)) as pool:
        ran = []
        for dtype, kernels in ways:
            asked = engine("gpt_oss", "atom", {**options, "dtype": dtype}, [_ask_at_length(count)])
            ran.append(pool.submit(run, [asked], environ={"ATOM_KERNELS": kernels}, deadline=540.0))
        both, alone, exact = (future.result()[0] for future in ran)
    assert both.model_class == "AtomGptOssForCausalLM"
    assert max(len(answer.prompt_logprobs) for answer in both.answers[0]) > LONG_PROMPT
    assert _rms(_errors(both, alone)) > 0.0, "both ran the same kernel"
    found, noise = _rms(_errors(both, exact)), _rms(_errors(alone, exact))
    assert found <= AS_EXACT * noise, f"{found:.4f}; by our kernel {noise:.4f}"


def _rms(numbers: list[float]) -> float:
    return math.sqrt(sum(number * number for number in numbers) / len(numbers))
