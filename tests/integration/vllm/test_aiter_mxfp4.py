"""The real vLLM as on gfx950, with checkpoints in MXFP4: aiter's FP4 products and experts, from load to answer.

aiter is the fake of tests/fakes; see :mod:`tests.integration.vllm.test_aiter`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.questions import MAX_TOKENS, checkpoint, read_rows
from tests.integration.vllm.offline import Ask, Engine, run
from tests.unit.core.mxfp4_checkpoints import make_quark
from tests.unit.core.wide_checkpoints import widen

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 12
FAMILIES = ("qwen3", "qwen3_moe")
KERNELS = {"ATOM_KERNELS": "embedding=reference,qk_norm_rope_cache=reference"}
OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def rows():
    return read_rows()[:NUM_ROWS]


@pytest.fixture(scope="module")
def ran(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4")
    asks = [Ask([row.prompt for row in rows], {"max_tokens": MAX_TOKENS})]
    for family in FAMILIES:
        widen(Path(checkpoint(family)), folder / f"wide {family}", 256)
        make_quark(folder / f"wide {family}", folder / family)
    engines = [Engine(str(folder / family), "atom", asks, OPTIONS, KERNELS) for family in FAMILIES]
    script = Path(__file__).with_name("as_on_amd.py")
    return dict(zip(FAMILIES, run(engines, environ={"GPU_ARCHS": "gfx950"}, script=script), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_right_but_for_a_few(family, ran, rows):
    right = sum(answer.text == f" {row.answer}\n" for answer, row in zip(ran[family].answers[0], rows, strict=True))
    # The models were not trained for numbers of four bits.
    assert right >= 0.9 * NUM_ROWS


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_are_aiters(family, ran):
    kernels = ran[family].kernels
    assert kernels["mxfp4_linear"] == "aiter"
    assert kernels.get("mxfp4_experts") == ("aiter" if family == "qwen3_moe" else None)
