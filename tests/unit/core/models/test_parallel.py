"""Ranks that share a model answer as one rank does: tensor parallel, pipeline parallel."""

from __future__ import annotations

import pytest
import torch

from atom_core.loading import check_files
from atom_core.models.decoder import Carried
from atom_core.models.read_config import read_model_config
from atom_core.runtime import PipelineStage, SingleRank
from atom_core.standalone import Runner, Step
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    NUM_LAYERS,
    VOCABULARY,
    distance,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.ranks import build, on_ranks, run, stages, tensor_parallel_logits

TOKENS = random_tokens(20)
LLAMA = FAMILIES[0]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def runner_of(directory, family, **settings):
    make_model(directory, make_config(family, **settings))
    return Runner(directory)


@every_family
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_has_the_logits_of_one_rank(tmp_path, family, world_size):
    assert VOCABULARY % 2, "the vocabulary is meant not to divide"
    runner = runner_of(tmp_path, family, num_key_value_heads=4, tie_word_embeddings=False)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, world_size):
        assert found.shape == expected.shape
        assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_key_value_heads_are_replicated_over_more_ranks(tmp_path, kv_heads):
    runner = runner_of(tmp_path, LLAMA, num_key_value_heads=kv_heads)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, 4):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@every_family
def test_a_tied_head_is_shared_out_with_the_embedding(tmp_path, family):
    runner = runner_of(tmp_path, family, tie_word_embeddings=True)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


def test_ranks_may_be_left_without_any_row_of_a_small_vocabulary(tmp_path):
    # 9 rows over 8 ranks are 2 each: the first five hold them all.
    runner = runner_of(tmp_path, LLAMA, vocab_size=9, num_attention_heads=8, head_dim=12)
    tokens = [token % 9 for token in TOKENS]
    expected = runner.logits(tokens)
    for found in tensor_parallel_logits(runner, tmp_path, tokens, 8):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.parametrize(
    ("settings", "world_size", "what"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "num_attention_heads=6"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "num_key_value_heads=6"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads=3"),
        ({"intermediate_size": 98}, 4, "intermediate_size=98"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_loading(tmp_path, settings, world_size, what):
    config = read_model_config(make_config(LLAMA, **settings))
    with pytest.raises(ValueError, match=f"tensor parallel size {world_size} .*{what}"):
        check_files(config, None, world_size)


@every_family
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)], ids=str)
def test_chained_stages_have_the_logits_of_one(tmp_path, family, tied, cuts):
    runner = runner_of(tmp_path, family, tie_word_embeddings=tied)
    carried = None
    for stage in stages(NUM_LAYERS, *cuts):
        model = build(runner, tmp_path, pipeline=stage)
        assert isinstance(carried, Carried) or stage.is_first()
        carried = run(runner, model, TOKENS, carried)
    assert torch.equal(model.logits(carried), runner.logits(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_only_what_it_runs(tmp_path, tied):
    runner = runner_of(tmp_path, LLAMA, tie_word_embeddings=tied)

    def names(model):
        return [name for name, _ in model.named_parameters(remove_duplicate=False)]

    first, last = (names(build(runner, tmp_path, pipeline=stage)) for stage in stages(NUM_LAYERS, 1))
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"1", "2"}
    assert "model.embed_tokens.weight" in first
    assert ("model.embed_tokens.weight" in last) == tied
    assert "model.norm.weight" not in first
    assert "lm_head.weight" not in first
    assert {"model.norm.weight", "lm_head.weight"} <= set(last)


def test_stages_and_shards_together(tmp_path):
    runner = runner_of(tmp_path, LLAMA)

    @torch.inference_mode()
    def work(group):
        carried = None
        for stage in stages(NUM_LAYERS, 2):
            model = build(runner, tmp_path, tensor_parallel=group, pipeline=stage)
            carried = run(runner, model, TOKENS, carried)
        return model.logits(carried)

    for found in on_ranks(2, work):
        assert distance(found, runner.logits(TOKENS)) <= LOGITS_TOLERANCE


def test_a_group_of_one_exchanges_nothing():
    x, group = torch.ones(2, 3), SingleRank()
    assert group.all_reduce(x) is group.all_gather(x) is group.reduce_scatter(x) is group.all_to_all(x, [2], [2]) is x


def test_a_stage_without_an_end_is_the_last():
    assert PipelineStage(2).is_last(5)
    assert list(PipelineStage(2).layers(5)) == [2, 3, 4]
    assert not PipelineStage(2, 4).is_last(5)
    assert not PipelineStage(2).is_first()


def test_embeddings_may_be_given_instead_of_tokens_and_are_left_alone(tmp_path):
    runner = runner_of(tmp_path, LLAMA)
    model = runner.model
    embeds = model.embed(torch.tensor(TOKENS))
    before = embeds.clone()
    step = Step(runner.batch([0], [len(TOKENS)]), runner.caches(1))
    with torch.inference_mode():
        hidden = model(None, torch.arange(len(TOKENS)), step, inputs_embeds=embeds)
        assert torch.equal(model.logits(hidden), runner.logits(TOKENS))
    assert torch.equal(embeds, before)
