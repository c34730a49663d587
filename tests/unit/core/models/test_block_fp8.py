"""Whole models of FP8 checkpoints with a scale a block: their logits are those that the checkpoint stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, make_fp8, make_plain, widen
from tests.unit.core.hugging_face import FAMILIES, LOGITS_TOLERANCE, distance, make_config, make_model, random_tokens
from tests.unit.core.ranks import tensor_parallel_logits

QWEN3 = FAMILIES[3]
TOKENS = random_tokens(24)
#: Whole blocks where weights are merged or shared, and a smaller last block of hidden numbers.
SIZES = {"hidden_size": 200, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 4}
every_format = pytest.mark.parametrize("form", BLOCK_FORMATS, ids=str)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)

#: As in test_fp8.py: what activations of three bits after the first do to logits. Scales of a wrong block do more.
ROUNDED_INPUTS = 0.15


def make(folder: Path, form, family=QWEN3, **settings) -> Path:
    make_model(folder / "source", make_config(family, **{**SIZES, **settings}))
    make_fp8(folder / "source", folder / "fp8", form)
    return folder / "fp8"


class ExactInputs:
    """A kernel that quantises no activation: what is left is the weights, and the answer must be exact."""

    def adopt(self, weight, weight_scale):
        pass

    def __call__(self, x, weight, weight_scale, bias):
        return torch.nn.functional.linear(x, weight.float() * widen(weight_scale, weight.shape), bias)


@pytest.fixture
def exact_inputs(monkeypatch):
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", ExactInputs)


@every_family
@every_format
@pytest.mark.usefixtures("exact_inputs")
def test_weights_are_those_that_the_checkpoint_stands_for(tmp_path, form, family):
    folder = make(tmp_path, form, family)
    make_plain(folder, tmp_path / "plain")
    found, expected = Runner(folder), Runner(tmp_path / "plain")
    assert distance(found.logits(TOKENS), expected.logits(TOKENS)) <= LOGITS_TOLERANCE


@every_format
def test_logits_are_near_those_of_unrounded_activations(tmp_path, form):
    folder = make(tmp_path, form)
    make_plain(folder, tmp_path / "plain")
    runner = Runner(folder)
    found, expected = runner.logits(TOKENS), Runner(tmp_path / "plain").logits(TOKENS)
    assert 1e-4 < distance(found, expected) <= ROUNDED_INPUTS
    assert {choice.op for choice in runner.runtime.kernels.choices()} >= {"fp8_block_linear", "linear"}


@every_format
def test_every_rank_has_the_logits_of_one_rank(tmp_path, form):
    # Groups of activations are quantised by themselves, so also with rounded inputs ranks agree with one.
    folder = make(tmp_path, form)
    runner = Runner(folder)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, folder, TOKENS, 2):
        assert distance(found, expected) <= ROUNDED_INPUTS


@every_format
@pytest.mark.usefixtures("exact_inputs")
def test_every_rank_has_the_logits_of_one_rank_exactly_where_nothing_is_rounded(tmp_path, form):
    folder = make(tmp_path, form)
    runner = Runner(folder)
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, folder, TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


def test_decoding_goes_on_as_the_prompt_began(tmp_path):
    runner = Runner(make(tmp_path, BLOCK_FORMATS[0]))
    (generated,) = runner.generate([TOKENS], 8)
    again = runner.logits([*TOKENS, *generated])[len(TOKENS) - 1 : -1].argmax(-1).tolist()
    assert again == generated


def check(folder: Path, tensor_parallel_size: int) -> None:
    hf = json.loads((folder / "config.json").read_text())
    check_files(read_model_config(hf), folder, tensor_parallel_size, read_quantization(hf))


def test_ranks_that_would_cut_a_block_are_refused_before_anything_is_loaded(tmp_path):
    folder = make(tmp_path, BLOCK_FORMATS[0], intermediate_size=384, num_key_value_heads=4)
    check(folder, 1)
    says = r"size 2 would cut FP8 blocks of model.layers.0.mlp.gate_proj: a rank would hold 192 of its 384 rows"
    with pytest.raises(ValueError, match=says):
        check(folder, 2)


def test_parts_that_begin_within_a_block_are_refused(tmp_path):
    folder = make(tmp_path, BLOCK_FORMATS[0], intermediate_size=200)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj is merged .* begins at row 200: within an FP8"):
        Runner(folder)


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{NAME}.weight_scale_inv": None}, rf"missing \(1\): {NAME}.weight_scale_inv"),
        ({f"{NAME}.weight_scale": torch.ones(())}, rf"unexpected \(1\): {NAME}.weight_scale in"),
        ({f"{NAME}.weight_scale_inv": torch.ones(())}, rf"{NAME}.weight_scale_inv in .* is \[\], should be \[2, 2\]"),
        ({f"{NAME}.weight_scale_inv": torch.full((2, 2), float("nan"))}, "weight_scale_inv holds a scale that is no"),
    ],
    ids=["no scale", "a scale of the whole", "one scale", "NaN"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, says):
    folder = make(tmp_path, BLOCK_FORMATS[0])
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ValueError, match=says):
        Runner(folder)
