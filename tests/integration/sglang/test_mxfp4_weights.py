"""Weights in AMD Quark's MXFP4, alone or with activations rounded too, in real SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, Ran, run
from tests.unit.core.mxfp4_checkpoints import make_plain_quark, make_quark, quark_mxfp4

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_ROWS = 64
#: Of a model that was not trained for numbers of four bits.
RIGHT = 0.9
MXFP4 = ("weights alone", "rounded activations")


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory) -> dict[str, Ran]:
    """Every engine that the tests look at."""
    folder = tmp_path_factory.mktemp("mxfp4")
    source = Path(checkpoint("qwen3"))
    for name in MXFP4:
        make_quark(source, folder / name, quark_mxfp4(rounded_inputs=name == "rounded activations"))
    make_plain_quark(folder / "weights alone", folder / "what they stand for", torch.bfloat16)
    asks = [Ask([row.prompt for row in rows[:NUM_ROWS]])]
    names = (*MXFP4, "what they stand for")
    return dict(zip(names, run([Engine(str(folder / name), True, asks) for name in names]), strict=True))


@pytest.mark.parametrize("name", MXFP4)
def test_answers_are_right_but_for_a_few(name, ran, rows):
    log, (answers,) = ran[name].log, ran[name].answers
    right = sum(answer.text == f" {row.answer}\n" for answer, row in zip(answers, rows, strict=False))
    assert right >= RIGHT * NUM_ROWS
    assert "atom-plugin serves" in log
    assert f"{'mxfp4_linear':20}reference" in log


def test_texts_of_weights_alone_are_those_of_the_numbers_that_they_stand_for(ran):
    found, expected = (
        [answer.text for answer in ran[name].answers[0]] for name in ("weights alone", "what they stand for")
    )
    assert found == expected
