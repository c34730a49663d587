"""A checkpoint's tensors against a model's parameters: everything that does not fit is listed at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atom_core.checkpoint import Checkpoint, read_config_json
from atom_core.loading import check_files, update_from
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.runtime import PipelineStage
from atom_core.standalone import Runner, build_runtime
from atom_core.weights import check_checkpoint, load_weights
from tests.unit.core.hugging_face import (
    FAMILIES,
    LOGITS_TOLERANCE,
    NUM_LAYERS,
    distance,
    logits,
    make_config,
    make_model,
    random_tokens,
)
from tests.unit.core.models.test_deepseek import V3
from tests.unit.core.models.test_qwen3_moe import FAMILY as QWEN3_MOE

LLAMA, QWEN3 = FAMILIES[0], FAMILIES[3]
TOKENS = random_tokens(9)
WHOLE = PipelineStage()


@pytest.fixture
def directory(tmp_path):
    make_model(tmp_path, make_config(QWEN3))
    return tmp_path


def empty_model(directory, stage=WHOLE):
    config = read_model_config(read_config_json(directory))
    runtime = replace(build_runtime(torch.device("cpu"), torch.float32, 16), pipeline=stage)
    return load_model_class(config.architecture)(config, runtime)


def edit(directory, change):
    """Let ``change`` work on the checkpoint's dictionary of tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def break_in_every_way(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.rotor.weight"] = torch.ones(2)
    tensors["model.layers.2.self_attn.o_proj.weight"] = torch.ones(3, 5)
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors["model.layers.2.mlp.down_proj.weight"].to(torch.int8)


def test_loading_lists_all_that_is_missing_unexpected_and_misshapen(directory):
    edit(directory, break_in_every_way)
    with pytest.raises(ValueError, match="does not fit Qwen3ForCausalLM") as caught:
        load_weights(empty_model(directory), Checkpoint.open(directory).load(), "somewhere")
    assert str(caught.value) == (
        "The checkpoint somewhere does not fit Qwen3ForCausalLM: "
        "missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "unexpected (1): model.layers.0.self_attn.rotor.weight; "
        "misshapen (2): "
        "model.layers.2.mlp.down_proj.weight is stored as int8, but config.json names no quantisation of it, "
        "model.layers.2.self_attn.o_proj.weight is [3, 5], should be [96, 80]. "
        "Check that config.json belongs to these weights."
    )


def test_checking_says_the_same_and_names_the_files(directory):
    edit(directory, break_in_every_way)
    with pytest.raises(ValueError, match="does not fit Qwen3ForCausalLM") as caught:
        check_checkpoint(empty_model(directory), Checkpoint.open(directory))
    message = str(caught.value)
    assert str(directory) in message
    assert "missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected (1): model.layers.0.self_attn.rotor.weight in model.safetensors" in message
    assert "down_proj.weight in model.safetensors is stored as I8, but config.json names no quantisation" in message
    assert "o_proj.weight in model.safetensors is [3, 5], should be [96, 80]" in message


def test_a_runner_refuses_before_it_loads(directory):
    edit(directory, break_in_every_way)
    with pytest.raises(ValueError, match=r"o_proj.weight in model\.safetensors is \[3, 5\]"):
        Runner(directory)


def test_a_long_list_is_cut_and_counted(directory):
    edit(directory, lambda tensors: tensors.update({f"extra.{index}": torch.ones(1) for index in range(30)}))
    with pytest.raises(ValueError, match=r"unexpected \(30\): extra\.0 in .*, \.\.\.") as caught:
        check_checkpoint(empty_model(directory), Checkpoint.open(directory))
    assert str(caught.value).count("extra.") == 12


def test_a_quantised_tensor_in_an_unquantised_model_is_named(directory):
    name = "model.layers.0.mlp.down_proj.weight"
    edit(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"{re.escape(name)} in .* is stored as F8_E4M3, but config.json names no"):
        Runner(directory)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is stored as F8_E4M3"):
        load_weights(empty_model(directory), Checkpoint.open(directory).load())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_another_floating_dtype_are_converted(directory, dtype):
    edit(directory, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    stored = load_file(directory / "model.safetensors")["model.norm.weight"]
    weight = Runner(directory).model.model.norm.weight
    assert stored.dtype == dtype
    assert torch.equal(weight, stored.float())


def test_every_parameter_is_loaded_and_named(directory):
    model = empty_model(directory)
    loaded = load_weights(model, Checkpoint.open(directory).load())
    assert loaded == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("other", [0, 1], ids=["the same numbers", "others"])
def test_a_tied_head_that_is_stored_too_is_what_it_is_to_hugging_face(tmp_path, other):
    make_model(tmp_path, make_config(LLAMA, tie_word_embeddings=True))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + other}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert distance(Runner(tmp_path).logits(TOKENS), logits(theirs, TOKENS)) < 1e-4


def test_an_untied_head_must_be_there(directory):
    edit(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head.weight"):
        Runner(directory)


def test_rope_tables_that_old_checkpoints_stored_are_ignored(directory):
    before = Runner(directory).logits(TOKENS)
    tables = {
        f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(3)
        for name in ("inv_freq", "cos_cached", "sin_cached")
    }
    edit(directory, lambda tensors: tensors.update(tables))
    assert torch.equal(Runner(directory).logits(TOKENS), before)


def test_a_pipeline_stage_ignores_other_stages_tensors_but_not_strangers(directory):
    model = empty_model(directory, PipelineStage(0, 1))
    check_checkpoint(model, Checkpoint.open(directory))
    loaded = load_weights(model, Checkpoint.open(directory).load())
    assert loaded == {name for name, _ in model.named_parameters()}
    edit(directory, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.layers\.9\.mlp"):
        check_checkpoint(model, Checkpoint.open(directory))


def test_a_checkpoint_is_checked_without_memory_for_its_tensors(directory):
    config = read_model_config(make_config(QWEN3))
    check_files(config, directory)
    check_files(config, directory, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor parallel size 3 does not divide num_attention_heads=4; use one of"):
        check_files(config, directory, tensor_parallel_size=3)


def test_a_tensor_that_comes_once_more_is_an_error(directory):
    tensors = list(Checkpoint.open(directory).load())
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.norm\.weight once more"):
        load_weights(empty_model(directory), [*tensors, ("model.norm.weight", torch.zeros(96))])


@pytest.mark.parametrize("order", [1, -1])
def test_another_head_than_the_tied_one_is_an_error_however_it_comes(tmp_path, order):
    make_model(tmp_path, make_config(LLAMA))
    tensors = dict(Checkpoint.open(tmp_path).load())
    embedding = tensors["model.embed_tokens.weight"]
    for head, fits in ((embedding.clone(), True), (embedding.double(), True), (embedding * 1.5, False)):
        given = list({**tensors, "lm_head.weight": head}.items())[::order]
        if fits:
            load_weights(empty_model(tmp_path), given)
            continue
        with pytest.raises(ValueError, match=r"lm_head\.weight with other values .* tie_word_embeddings=true"):
            load_weights(empty_model(tmp_path), given)


@pytest.mark.parametrize("family", [LLAMA, QWEN3_MOE, V3], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_layers_behind_the_last_that_config_json_counts_are_left_unread(tmp_path, family, count, caplog):
    make_model(tmp_path, make_config(family, layer_types=None))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": count}))
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), TOKENS)
    runner = Runner(tmp_path)
    assert distance(runner.logits(TOKENS), expected) <= LOGITS_TOLERANCE
    which = "layer 2 is" if count == NUM_LAYERS - 1 else "layers 1 to 2 are"
    said = [record.getMessage() for record in caplog.records if "unread" in record.getMessage()]
    assert said == [f"num_hidden_layers={count}: of {tmp_path}, {which} left unread"]


def test_layers_behind_the_last_are_left_unread_in_updates_too(directory, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        make_model(folder, make_config(LLAMA), seed=folder == new)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))
    expected = Runner(new).logits(TOKENS)
    runner = Runner(old)
    runner.reload(new)
    assert torch.equal(runner.logits(TOKENS), expected)
    runner = Runner(old)
    runner.weights.update(list(Checkpoint.open(new).load()), "a trainer", whole=True)
    assert torch.equal(runner.logits(TOKENS), expected)
    # Made up first, as by ``--load-format dummy``.
    runner = Runner(old)
    runner.model.unread = range(0)
    update_from(runner.weights, runner.config, new, runner.runtime.quant)
    assert torch.equal(runner.logits(TOKENS), expected)
