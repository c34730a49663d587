"""Data-parallel attention in real SGLang: ranks with requests of their own give the tokens of one that has them all.

SGLang pins memory for it, also on a CPU; `pinned_on_cpu` has it do without.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mixtures import CANDIDATES, NUM_TOKENS, PROMPTS, make_drafting, make_mixture
from tests.integration.server import free_ports
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_drafts import ENVIRON as OF_DRAFTS
from tests.integration.sglang.test_mixtures import BOUND
from tests.integration.sglang.test_mtp import tokens
from tests.thorough import some

pytestmark = pytest.mark.sglang

PINNED = str(Path(__file__).parent / "pinned_on_cpu")
ENVIRON = {"PYTHONPATH": os.pathsep.join([PINNED, os.environ.get("PYTHONPATH", "")])}
DRAFTING = {**OF_DRAFTS, "PYTHONPATH": os.pathsep.join([PINNED, OF_DRAFTS["PYTHONPATH"]])}

EXACTLY = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
FLOAT32: dict[str, Any] = {"dtype": "float32"}
#: SGLang captures several drafts in a row also on a CPU, where it has nothing to do it with.
EAGER = {"disable_cuda_graph": True}
#: Two ranks with attention of their own, and with parts of all experts or half of them whole.
PARTS = {**FLOAT32, "tp_size": 2, "attn_dp_size": 2}
WHOLE = {**PARTS, "ep_size": 2}
#: By its old name, in chunks, of which later ones look back at pages.
CHUNKS = {**FLOAT32, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "page_size": 4, "chunked_prefill_size": 8}
#: With other settings of SGLang's that say what is so in any case.
SAID = {**WHOLE, "enable_dp_lm_head": True, "moe_dense_tp_size": 1}
ENGINES = {"deepseek_v3": (WHOLE, CHUNKS), "qwen3_moe": (SAID,), "gpt_oss": (PARTS,)}
#: Two attention groups of two ranks each.
FOUR = {**FLOAT32, "tp_size": 4, "attn_dp_size": 2}
FOUR_BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}

#: How far above its own port SGLang has those of its processes.
DERIVED = 300
#: Prompts at once, of which the ranks have several each; and one alone, with a rank that has none.
MANY = (*PROMPTS, *CANDIDATES[:9])
ASKS = [Ask(MANY, EXACTLY), *(Ask([prompt], EXACTLY) for prompt in PROMPTS)]


def engine(folder: Path, options: dict[str, Any], bound: dict[str, str] = BOUND) -> Engine:
    """One that is asked all; an engine before it may still have the ports that SGLang derives from the usual one."""
    return Engine(str(folder), True, ASKS, {**options, "port": free_ports(DERIVED)}, bound)


def check(ran, plain, expected):
    """The answers of ``ran`` to :data:`ASKS` are those of one rank, and Hugging Face's."""
    assert tokens(ran.answers[0]) == tokens(plain.answers[0])
    assert tokens(ran.answers[0])[: len(PROMPTS)] == expected
    assert [tokens(answers)[0] for answers in ran.answers[1:]] == expected
    assert {answer.meta["dp_rank"] for answer in ran.answers[0]} == {0, 1}


@pytest.mark.parametrize("family", some(ENGINES, ("deepseek_v3", "qwen3_moe")))
def test_tokens_are_those_of_one_rank(tmp_path, family):
    expected = make_mixture(tmp_path, family)
    engines = [engine(tmp_path, options) for options in ENGINES[family]]
    plain, *found = run([Engine(str(tmp_path), True, ASKS[:1], FLOAT32), *engines], environ=ENVIRON)
    for ran in found:
        check(ran, plain, expected)
        assert ran.log.count("atom-plugin serves") == 1


def test_layers_of_the_checkpoint_draft(tmp_path):
    expected = make_drafting(tmp_path)
    count = 3
    drafts = engine(tmp_path, drafting(count, **WHOLE, **EAGER))
    plain, ran = run([Engine(str(tmp_path), True, ASKS[:1], FLOAT32), drafts], environ=DRAFTING)
    check(ran, plain, expected.answers)
    right = sum(answer.meta["spec_num_correct_drafts"] for answer in ran.answers[0][: len(PROMPTS)])
    assert right == expected.right[count] > 0


@pytest.mark.slow
def test_attention_groups_of_two_ranks(tmp_path):
    # SGLang widens on a CPU what it would not cut otherwise: 32 columns of each expert a rank.
    expected = make_drafting(tmp_path, moe_intermediate_size=128)
    drafts = engine(tmp_path, drafting(1, **FOUR, **EAGER, ep_size=4), FOUR_BOUND)
    plain, ran = run([Engine(str(tmp_path), True, ASKS[:1], FLOAT32), drafts], environ=DRAFTING)
    check(ran, plain, expected.answers)
