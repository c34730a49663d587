"""Speculative decoding gives the tokens of decoding one by one, whatever the draft is worth.

SGLang lacks two kernels of it on a CPU; `chains_on_cpu` has its Triton ones run in the interpreter instead.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FOLDER = Path(__file__).parent
#: SGLang's own rope imports a kernel of vLLM's on a CPU: the head on hidden states is a model of its own.
STAND_INS = (FOLDER / "chains_on_cpu", FOLDER / "stand_ins")
NUM_PROMPTS = 6
LENGTH = 24
# Past the end of an answer the checkpoints are no longer sure, and draft and target often disagree.
PAST_THE_END = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH}
FLOAT32 = {"dtype": "float32", "disable_cuda_graph": True}
ENVIRON = {
    "PYTHONPATH": os.pathsep.join([*map(str, STAND_INS), os.environ.get("PYTHONPATH", "")]),
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # small helpers of SGLang's, which take minutes to compile
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
}


def standalone(draft: str, **options: object) -> dict[str, object]:
    """Three tokens in a row by a model of its own."""
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": checkpoint(draft),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        **FLOAT32,
        **options,
    }


@pytest.fixture
def eagle(tmp_path) -> dict[str, object]:
    """A head on the target's hidden states, a model of SGLang's own, with random weights."""
    source = Path(checkpoint("qwen3"))
    for file in source.glob("token*"):
        shutil.copy(file, tmp_path)
    changes = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": 32,
        "hidden_act": "silu",
    }
    kept = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "eos_token_id")
    config = json.loads((source / "config.json").read_text())
    described = {name: config[name] for name in kept} | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes
    (tmp_path / "config.json").write_text(json.dumps(described))
    return {
        **standalone("qwen3"),
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(tmp_path),
        "speculative_draft_load_format": "dummy",
    }


def assert_hugging_faces(model, rows, answers):
    for row, answer in zip(rows[:NUM_PROMPTS], answers, strict=True):
        assert len(answer.tokens) == LENGTH
        assert answer.tokens == model.greedy_along(row.prompt, answer.tokens, past_the_end=True)


def acceptance(answers):
    """Of the draft's tokens, how many were the target's too."""
    right, proposed = (
        sum(answer.meta[name] for answer in answers) for name in ("spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    return right / proposed


def test_a_model_of_its_own_drafts_and_the_tokens_stay_the_same(hugging_face, rows):
    prompts = [row.prompt for row in rows[:NUM_PROMPTS]]
    itself, another = run(
        [
            Engine(checkpoint("qwen3"), True, [Ask(prompts)], standalone("qwen3")),
            Engine(
                checkpoint("qwen3"),
                True,
                [Ask(prompts, PAST_THE_END)],
                standalone("llama", page_size=16, chunked_prefill_size=64),
            ),
        ],
        environ=ENVIRON,
    )
    for ran in (itself, another):
        assert ran.log.count("attention  SglangRadixAttention") == 2
    assert [answer.text for answer in itself.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]
    assert acceptance(itself.answers[0]) == 1.0
    assert_hugging_faces(hugging_face("qwen3"), rows, another.answers[0])
    assert 0.1 < acceptance(another.answers[0]) < 0.9


def test_a_head_on_our_hidden_states_drafts_and_the_tokens_stay_the_same(eagle, hugging_face, rows):
    asks = [Ask([row.prompt for row in rows[:NUM_PROMPTS]], PAST_THE_END)]
    (ran,) = run([Engine(checkpoint("qwen3"), True, asks, eagle)], environ=ENVIRON)
    assert ran.log.count("attention  SglangRadixAttention") == 1
    assert_hugging_faces(hugging_face("qwen3"), rows, ran.answers[0])
    assert acceptance(ran.answers[0]) < 0.5
