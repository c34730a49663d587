"""Mixtral against Hugging Face: names and routing of its own, otherwise what Qwen3-MoE's tests say holds."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from atom_core.models.read_config import read_model_config
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import (
    LOGITS_TOLERANCE,
    Family,
    distance,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.ranks import tensor_parallel_logits

FAMILY = Family("MixtralForCausalLM", "mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2})
TOKENS = random_tokens(40)


@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 9}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 6}, {"tie_word_embeddings": True}],
    ids=str,
)
def test_logits_are_hugging_faces(tmp_path, settings):
    model = make_model(tmp_path, make_config(FAMILY, **settings))
    assert distance(Runner(tmp_path).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


@pytest.mark.parametrize(
    "key", ["sliding_window", "rope_parameters", "rms_norm_eps", "head_dim", "num_experts_per_tok"]
)
def test_a_missing_key_means_what_hugging_faces_class_takes_it_for(key):
    values = {name: value for name, value in make_config(FAMILY).to_dict().items() if name != key}
    assert read_model_config(values) == read_model_config(AutoConfig.for_model(**values).to_dict())


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_that_share_them_answer_as_one(tmp_path, expert_parallel):
    make_model(tmp_path, make_config(FAMILY))
    runner = Runner(tmp_path)
    expected = runner.logits(TOKENS)
    found = tensor_parallel_logits(runner, tmp_path, TOKENS, 2, expert_parallel=expert_parallel)
    assert all(distance(it, expected) <= LOGITS_TOLERANCE for it in found)


def test_more_experts_a_token_than_there_are_is_refused():
    values = {**make_config(FAMILY).to_dict(), "architectures": [FAMILY.architecture], "num_experts_per_tok": 7}
    with pytest.raises(
        ValueError, match=r"num_experts_per_tok=7 is more than there are experts \(num_local_experts=6\)"
    ):
        read_model_config(values)
