"""A pool in two parts, one for layers with a window: SGLang has it for some families, so far none of ours.

A small Mellum with random weights, SGLang's own model, runs on our attention by name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import MellumConfig, MellumForCausalLM

from tests.integration.questions import checkpoint
from tests.integration.sglang.hugging_face import HuggingFace
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

#: SGLang's own rope imports a kernel of vLLM's on a CPU.
STAND_INS = Path(__file__).with_name("stand_ins")
NUM_PROMPTS = 4
LENGTH = 24
WINDOW = 40
OPTIONS = {"attention_backend": "atom", "dtype": "float32", "max_total_tokens": 4096, "chunked_prefill_size": 64}


@pytest.fixture
def mellum(tmp_path) -> str:
    """Alternating layers with and without a window; prompts are several windows long."""
    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
    )
    MellumForCausalLM(config).save_pretrained(tmp_path)
    for file in Path(checkpoint("qwen3")).glob("token*"):
        shutil.copy(file, tmp_path)
    return str(tmp_path)


def test_both_parts_are_read_and_written(mellum, rows):
    prompts = [row.prompt for row in rows[:NUM_PROMPTS]]
    asks = [Ask(prompts, {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH})] * 2  # again, from the prefix cache
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    runs = run(
        [Engine(mellum, False, asks, {**OPTIONS, "page_size": page_size}) for page_size in (1, 16)],
        environ={"PYTHONPATH": path},
    )
    reference = HuggingFace(mellum)
    for ran in runs:
        assert "hybrid_swa=True" in ran.log
        for answers in ran.answers:
            for prompt, answer in zip(prompts, answers, strict=True):
                assert len(answer.tokens) == LENGTH
                assert answer.tokens == reference.greedy_along(prompt, answer.tokens, past_the_end=True)
