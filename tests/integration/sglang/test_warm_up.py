"""Models that were warmed up, as SGLang has it done on a GPU alone, give the tokens that they give otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mixtures import make_mixture
from tests.integration.questions import BY_VECTORS, MAX_TOKENS, checkpoint, greedy_tokens, read_rows
from tests.integration.server import free_ports
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_dp_attention import DERIVED, PINNED, SAID, check
from tests.integration.sglang.test_dp_attention import engine as with_two_ranks
from tests.integration.sglang.test_drafts import ENVIRON, STAND_INS
from tests.integration.sglang.test_mixtures import BOUND

pytestmark = pytest.mark.sglang

WARMED = str(Path(__file__).parent / "warmed_on_cpu")
FEW = {"chunked_prefill_size": 128, "max_running_requests": 8, "disable_cuda_graph": True, **BY_VECTORS}
#: By name: the checkpoint, and its engine's options.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**FEW, "page_size": 16}),
    "gpt_oss": ("gpt_oss", {**FEW, "chunked_prefill_size": -1, "max_prefill_tokens": 512}),
    "qwen3_moe": ("qwen3_moe", {**FEW, "enable_return_routed_experts": True}),
    "qwen3_next": ("qwen3_next", FEW),
    "SGLang's attention": ("qwen3_5", {**FEW, "attention_backend": "torch_native"}),
    "deepseek_v3, drafts": ("deepseek_v3", drafting(2, **FEW)),
    "two stages": ("qwen3", {**FEW, "pp_size": 2}),
    "two ranks": ("deepseek_v3", {**FEW, "tp_size": 2}),
}


def environ(*folders: str) -> dict[str, str]:
    """With the plug-in that warms up."""
    return {"PYTHONPATH": os.pathsep.join([WARMED, *folders, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(
    "name", [name if "two" not in name else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_a_model_that_was_warmed_up_answers_right(name):
    family, options = WAYS[name]
    rows = read_rows()[:8]
    variables = environ(PINNED)
    if "drafts" in name:
        variables = {**ENVIRON, **environ(*map(str, STAND_INS))}
    if "two" in name:
        options, variables = {**options, "port": free_ports(DERIVED)}, {**variables, **BOUND}
    asks = [Ask([row.prompt for row in rows], {"max_new_tokens": MAX_TOKENS})]
    (ran,) = run([Engine(checkpoint(family), True, asks, options, variables)])
    assert [answer.tokens for answer in ran.answers[0]] == greedy_tokens(family, rows)


@pytest.mark.slow
def test_ranks_with_attention_of_their_own_warm_up_together(tmp_path):
    expected = make_mixture(tmp_path, "qwen3_moe")
    plain, ours = with_two_ranks(tmp_path, {"dtype": "float32"}, {}), with_two_ranks(tmp_path, SAID)
    found = run([plain, ours], environ=environ(PINNED))
    check(found[1], found[0], expected)
