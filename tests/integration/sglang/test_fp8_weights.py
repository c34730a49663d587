"""Weights in FP8: checkpoints of each tool that writes them, and ``--quantization fp8`` for one that is not.

Numbers of one byte cost an answer now and then, so answers are counted. A scale that is lost, or another row's, leaves
hardly any right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, Ran, run
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_ROWS = 64
RIGHT = 0.9
#: How weights are read is tested without an engine; here some go all the way.
NAMES = ("compressed, tensor, static", "modelopt", "fp8, blocks")
SERVED = [form for form in (*FORMATS, *BLOCK_FORMATS) if form.name in NAMES]
#: What inputs of these models' layers are divided by: few are larger than 448 times it.
INPUT_SCALE = 0.05


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory) -> dict[str, Ran]:
    """Every engine that the tests look at."""
    folder = tmp_path_factory.mktemp("fp8")
    asks = [Ask([row.prompt for row in rows[:NUM_ROWS]])]
    plain = checkpoint("qwen3")
    engines = {}
    for form in SERVED:
        make_fp8(Path(plain), folder / form.name, form, input_scale=lambda module: INPUT_SCALE)
        engines[form.name] = Engine(str(folder / form.name), True, asks)
    engines["by a flag"] = Engine(plain, True, asks, {"quantization": "fp8"})
    return dict(zip(engines, run(list(engines.values())), strict=True))


FP8 = [form.name for form in SERVED] + ["by a flag"]


@pytest.mark.parametrize("name", FP8)
def test_answers_are_right_but_for_a_few(name, ran, rows):
    log, (answers,) = ran[name].log, ran[name].answers
    right = sum(answer.text == f" {row.answer}\n" for answer, row in zip(answers, rows, strict=False))
    assert right >= RIGHT * NUM_ROWS
    assert "atom-plugin serves" in log
    op = "fp8_block_linear" if "blocks" in name else "fp8_linear"
    assert f"{op:20}reference" in log
