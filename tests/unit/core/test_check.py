"""Our model beside Hugging Face's: agreement is found, and a difference is found where it begins."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from atom_core.check import TOLERANCES, Continuation, Report, Stage, compare, compare_models
from atom_core.hugging_face import load_reference
from atom_core.standalone import Runner
from tests.unit.core.hugging_face import FAMILIES, NUM_LAYERS, make_config, make_model, random_tokens

QWEN3 = FAMILIES[3]
STAGES = ["the embedding", *(f"layer {index}" for index in range(NUM_LAYERS)), "the final norm", "logits"]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


@pytest.fixture
def directory(tmp_path):
    make_model(tmp_path, make_config(QWEN3))
    return tmp_path


def compare_with(directory, change=lambda parameters: None, change_reference=lambda reference: None):
    """The comparison after ``change`` had its way with our model's parameters, by name."""
    runner = Runner(directory)
    with torch.no_grad():
        change(dict(runner.model.named_parameters()))
    reference = load_reference(directory, torch.float32, torch.device("cpu"))
    change_reference(reference)
    return compare_models(runner, reference, random_tokens(20), 6, TOLERANCES[torch.float32], directory)


@every_family
def test_both_models_of_one_checkpoint_agree_at_every_stage(tmp_path, family):
    make_model(tmp_path, make_config(family))
    report = compare(tmp_path)
    assert [stage.name for stage in report.stages] == STAGES
    assert report.passed
    assert report.first_difference is None
    assert report.continuation.ours == report.continuation.theirs
    assert len(report.continuation.ours) == 16
    assert report.num_tokens == 48, "the context of 64 tokens less 16 to follow"
    assert f"{family.architecture} agrees with Hugging Face at every stage" in str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_16_bit_types_agree_within_their_own_tolerance(directory, dtype):
    report = compare(directory, dtype=dtype)
    assert report.first_difference is None
    assert report.tolerance == TOLERANCES[dtype]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("part", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"])
def test_a_wrong_weight_is_located_at_its_layer(directory, layer, part):
    report = compare_with(directory, lambda parameters: parameters[f"model.layers.{layer}.{part}.weight"].mul_(1.05))
    assert not report.passed
    assert report.first_difference.name == f"layer {layer}"
    assert f"differs from Hugging Face, first at layer {layer}: " in str(report)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.embed_tokens.weight", "the embedding"),
        ("model.norm.weight", "the final norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_a_wrong_weight_around_the_layers_is_located_too(directory, name, stage):
    assert compare_with(directory, lambda parameters: parameters[name].mul_(1.05)).first_difference.name == stage


@pytest.mark.parametrize("call", [1, 2], ids=["prompt", "next token"])
def test_what_transformers_cannot_run_is_one_line(directory, call):
    calls = iter(range(1, 100))

    def fail(module, given):
        if next(calls) == call:
            raise RuntimeError("no such kernel\nfor this device")

    with pytest.raises(ValueError, match=r"^Transformers \S+ cannot run .*: RuntimeError: no such kernel$"):
        compare_with(directory, change_reference=lambda reference: reference.register_forward_pre_hook(fail))


def test_a_nan_is_a_difference(directory):
    report = compare_with(
        directory, lambda parameters: parameters["model.layers.1.mlp.down_proj.weight"].fill_(torch.nan)
    )
    assert report.first_difference.name == "layer 1"
    assert not report.passed


def test_a_prompt_is_split_by_the_checkpoints_tokenizer(directory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"one": 1, "two": 2, "three": 3, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(directory)
    report = compare(directory, prompt="three two one two", new_tokens=3)
    assert report.num_tokens == 4
    assert report.passed


def test_a_prompt_without_a_tokenizer_is_an_error(directory):
    with pytest.raises(ValueError, match="has no tokenizer to split the prompt with"):
        compare(directory, prompt="three two one")


def test_a_length_beyond_the_context_is_an_error(directory):
    with pytest.raises(ValueError, match=r"has 1 tokens; with 64 to follow, it must have 1 to 0 \(max_position_embed"):
        compare(directory, new_tokens=64)


def test_a_checkpoint_that_we_cannot_run_is_an_error(directory):
    (directory / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        compare(directory)


def test_without_transformers_the_error_says_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        compare(directory)


def report_of(ours, theirs, tied=False, difference=0.0):
    return Report(
        directory=None,
        architecture="It",
        dtype=torch.float32,
        num_tokens=3,
        tolerance=1e-4,
        stages=(Stage("logits", difference, 2.0),),
        continuation=Continuation(ours, theirs, tied),
    )


@pytest.mark.parametrize(
    ("report", "passed", "verdict"),
    [
        (report_of((1, 2), (1, 2)), True, "and in all 2 tokens that follow."),
        (report_of((1, 2), (1, 3)), False, "not in token 2 of the 2 that follow: decoding differs from prefill."),
        (
            report_of((1, 2), (1, 3), tied=True),
            True,
            "Token 2 of the 2 that follow is a tie that was broken differently.",
        ),
        (report_of((1,), (1,), difference=0.1), False, "at logits: 5.0e-02 of the spread, allowed 1e-04."),
        (report_of((1,), (1,), difference=1e-4), True, "agrees"),
    ],
)
def test_the_verdict(report, passed, verdict):
    assert report.passed == passed
    assert verdict in str(report)


def test_a_stage_without_spread_counts_its_difference():
    assert Stage("logits", 0.5, 0.0).relative == 0.5
    assert not replace(report_of((1,), (1,)), stages=(Stage("logits", 0.5, 0.0),)).passed
