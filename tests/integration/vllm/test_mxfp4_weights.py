"""Weights in MXFP4 in real vLLM: AMD Quark's, alone or with activations rounded too, and GPT-OSS's experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.questions import checkpoint
from tests.integration.vllm.conftest import ANSWER
from tests.integration.vllm.offline import Ask, Engine, Ran, run
from tests.unit.core.mxfp4_checkpoints import (
    make_gpt_oss,
    make_plain_gpt_oss,
    make_plain_quark,
    make_quark,
    quark_mxfp4,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 64
#: Of a model that was not trained for numbers of four bits.
RIGHT = 0.9
MXFP4 = ("weights alone", "rounded activations")
GPT_OSS = "GPT-OSS's experts"
#: And the same numbers in 16 bits.
UNPACKED = {"weights alone": "what they stand for", GPT_OSS: "what these stand for"}


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory) -> dict[str, Ran]:
    """Every engine that the tests look at."""
    folder = tmp_path_factory.mktemp("mxfp4")
    source = Path(checkpoint("qwen3"))
    for name in MXFP4:
        make_quark(source, folder / name, quark_mxfp4(rounded_inputs=name == "rounded activations"))
    make_plain_quark(folder / "weights alone", folder / UNPACKED["weights alone"], torch.bfloat16)
    make_gpt_oss(Path(checkpoint("gpt_oss")), folder / GPT_OSS)
    make_plain_gpt_oss(Path(checkpoint("gpt_oss")), folder / UNPACKED[GPT_OSS])
    asks = [Ask([row.prompt for row in rows[:NUM_ROWS]], {**ANSWER, "logprobs": 1})]
    names = (*MXFP4, GPT_OSS, *UNPACKED.values())
    return dict(zip(names, run([Engine(str(folder / name), "atom", asks) for name in names]), strict=True))


@pytest.mark.parametrize("name", [*MXFP4, GPT_OSS])
def test_answers_are_right_but_for_a_few(name, ran, rows):
    answers = ran[name].answers[0]
    right = sum(answer.text == f" {row.answer}\n" for answer, row in zip(answers, rows, strict=False))
    assert right >= RIGHT * NUM_ROWS


@pytest.mark.parametrize("name", UNPACKED)
def test_tokens_of_weights_alone_are_those_of_the_numbers_that_they_stand_for(name, ran):
    found, expected = ([answer.tokens for answer in ran[it].answers[0]] for it in (name, UNPACKED[name]))
    assert found == expected


def test_rounded_activations_are_rounded(ran):
    certainty = [[answer.logprobs for answer in ran[name].answers[0]] for name in MXFP4]
    assert certainty[0] != certainty[1]


@pytest.mark.parametrize("name", MXFP4)
def test_it_is_ours_and_packed(name, ran):
    assert ran[name].model_class == "AtomQwen3ForCausalLM"
    assert ran[name].kernels["mxfp4_linear"] == "reference"
    assert ran[name].kernels["linear"] in ("framework", "torch", "widened")  # the head
    assert "mxfp4_linear" not in ran[UNPACKED["weights alone"]].kernels


def test_gpt_oss_is_ours_and_its_experts_are_packed(ran):
    assert ran[GPT_OSS].model_class == "AtomGptOssForCausalLM"
    assert ran[GPT_OSS].kernels["mxfp4_experts"] == "reference"
    assert "mxfp4_experts" not in ran[UNPACKED[GPT_OSS]].kernels
