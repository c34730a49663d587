"""Weights in FP8: checkpoints of each tool that writes them, and ``--quantization fp8`` for one that is not.

Numbers of one byte cost an answer now and then, so answers are counted. A scale that is lost, or another row's, leaves
hardly any right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.questions import checkpoint
from tests.integration.vllm.conftest import ANSWER
from tests.integration.vllm.offline import Ask, Engine, Ran, run
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 64
RIGHT = 0.9
#: How weights are read is tested without an engine; here one of each tool goes all the way.
NAMES = ("fp8, static", "compressed, channel, dynamic", "modelopt", "quark, tensor, static", "fp8, blocks")
SERVED = [form for form in (*FORMATS, *BLOCK_FORMATS) if form.name in NAMES]
#: What inputs of these models' layers are divided by: few are larger than 448 times it.
INPUT_SCALE = 0.05


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory) -> dict[str, Ran]:
    """Every engine that the tests look at."""
    folder = tmp_path_factory.mktemp("fp8")
    asks = [Ask([row.prompt for row in rows[:NUM_ROWS]], {**ANSWER, "logprobs": 1})]
    plain = checkpoint("qwen3")
    draft = {"method": "draft_model", "num_speculative_tokens": 2}
    engines = {"no quantisation": Engine(plain, "atom", asks)}
    for form in SERVED:
        make_fp8(Path(plain), folder / form.name, form, input_scale=lambda module: INPUT_SCALE)
        engines[form.name] = Engine(str(folder / form.name), "atom", asks)
    quantised = str(folder / SERVED[0].name)
    engines["by a flag"] = Engine(plain, "atom", asks, {"quantization": "fp8"})
    engines["a draft in FP8"] = Engine(plain, "atom", asks, {"speculative_config": {**draft, "model": quantised}})
    return dict(zip(engines, run(list(engines.values())), strict=True))


FP8 = [form.name for form in SERVED] + ["by a flag"]


@pytest.mark.parametrize("name", FP8)
def test_answers_are_right_but_for_a_few(name, ran, rows):
    answers = ran[name].answers[0]
    right = sum(answer.text == f" {row.answer}\n" for answer, row in zip(answers, rows, strict=False))
    assert right >= RIGHT * NUM_ROWS


@pytest.mark.parametrize("name", FP8)
def test_it_is_ours_and_quantised(name, ran):
    assert ran[name].model_class == "AtomQwen3ForCausalLM"
    op, other = ("fp8_block_linear", "fp8_linear") if "blocks" in name else ("fp8_linear", "fp8_block_linear")
    assert ran[name].kernels[op] == "reference"
    assert other not in ran[name].kernels
    assert ran[name].kernels["linear"] in ("framework", "torch", "widened")  # the head
    certainty = [[answer.logprobs for answer in ran[it].answers[0]] for it in (name, "no quantisation")]
    assert certainty[0] != certainty[1]


def test_an_unquantised_model_has_no_such_kernel(ran):
    assert not {"fp8_linear", "fp8_block_linear"} & set(ran["no quantisation"].kernels)


def test_a_draft_in_fp8_is_ours_too(ran):
    assert ran["a draft in FP8"].draft_class == "AtomQwen3ForCausalLM"
    assert [answer.tokens for answer in ran["a draft in FP8"].answers[0]] == [
        answer.tokens for answer in ran["no quantisation"].answers[0]
    ]
    proposed, accepted = (
        ran["a draft in FP8"].counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert accepted > 0.9 * proposed
