"""Whole models of FP8 checkpoints: their logits are those of the weights that the checkpoint stands for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.quant import read_quantization
from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import FORMATS, make_fp8, make_plain
from tests.unit.core.hugging_face import FAMILIES, LOGITS_TOLERANCE, distance, make_config, make_model, random_tokens
from tests.unit.core.ranks import tensor_parallel_logits

LLAMA, QWEN3 = FAMILIES[0], FAMILIES[3]
TOKENS = random_tokens(24)
DYNAMIC = FORMATS[0]
every_format = pytest.mark.parametrize("form", FORMATS, ids=str)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)

#: Largest |difference| of logits, as a share of their spread, to those of the same weights with activations as they
#: are. e4m3 keeps 3 bits after the first, so a rounding is up to a 16th of a number; over three layers of this random
#: model it adds up to 6% to 9% of the spread, and scales of one layer that are wrong or of other rows to 18% or more.
ROUNDED_INPUTS = 0.15


def source_of(tmp_path, family=QWEN3, **settings):
    make_model(tmp_path / "source", make_config(family, **settings))
    return tmp_path / "source"


class ExactInputs:
    """A kernel that quantises no activation: what is left is the weights, and the answer must be exact."""

    def adopt(self, weight, weight_scale):
        pass

    def __call__(self, x, weight, weight_scale, input_scale, bias):
        return torch.nn.functional.linear(x, weight.float() * weight_scale[:, None], bias)


@pytest.fixture
def exact_inputs(monkeypatch):
    monkeypatch.setattr("atom_core.kernels.fp8_linear.ReferenceFp8Linear", ExactInputs)


@every_family
@every_format
@pytest.mark.usefixtures("exact_inputs")
def test_weights_are_those_that_the_checkpoint_stands_for(tmp_path, form, family):
    make_fp8(source_of(tmp_path, family), tmp_path / "fp8", form)
    make_plain(tmp_path / "fp8", tmp_path / "plain")
    found, expected = Runner(tmp_path / "fp8"), Runner(tmp_path / "plain")
    assert distance(found.logits(TOKENS), expected.logits(TOKENS)) <= LOGITS_TOLERANCE


@every_format
def test_logits_are_near_those_of_unrounded_activations(tmp_path, form):
    make_fp8(source_of(tmp_path), tmp_path / "fp8", form)
    make_plain(tmp_path / "fp8", tmp_path / "plain")
    found, expected = Runner(tmp_path / "fp8").logits(TOKENS), Runner(tmp_path / "plain").logits(TOKENS)
    assert 1e-4 < distance(found, expected) <= ROUNDED_INPUTS


@every_format
@pytest.mark.usefixtures("exact_inputs")
def test_every_rank_has_the_logits_of_one_rank(tmp_path, form):
    make_fp8(source_of(tmp_path, LLAMA, num_key_value_heads=1), tmp_path / "fp8", form)
    runner = Runner(tmp_path / "fp8")
    expected = runner.logits(TOKENS)
    for found in tensor_parallel_logits(runner, tmp_path / "fp8", TOKENS, 2):
        assert distance(found, expected) <= LOGITS_TOLERANCE


def test_decoding_goes_on_as_the_prompt_began(tmp_path):
    make_fp8(source_of(tmp_path), tmp_path / "fp8", DYNAMIC)
    runner = Runner(tmp_path / "fp8")
    (generated,) = runner.generate([TOKENS], 8)
    again = runner.logits([*TOKENS, *generated])[len(TOKENS) - 1 : -1].argmax(-1).tolist()
    assert again == generated


def test_an_unquantised_checkpoint_can_be_quantised_while_it_is_loaded(tmp_path):
    source = source_of(tmp_path)
    per_row = next(form for form in FORMATS if form.per_row)
    make_fp8(source, tmp_path / "fp8", per_row)
    online, offline = Runner(source, quantization="fp8"), Runner(tmp_path / "fp8")
    assert torch.equal(online.logits(TOKENS), offline.logits(TOKENS))
    weights = dict(online.model.named_parameters())
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert weights["lm_head.weight"].dtype == weights["model.embed_tokens.weight"].dtype == torch.float32
    assert {choice.op for choice in online.runtime.kernels.choices()} >= {"fp8_linear", "linear"}


@pytest.mark.usefixtures("exact_inputs")
def test_modules_that_the_checkpoint_leaves_out_stay_as_they_are(tmp_path):
    form = next(form for form in FORMATS if form.name == "compressed, channel, dynamic")
    ignore = ["lm_head", "re:.*layers.0.*", "model.layers.1.mlp.down_proj"]
    kept = type(form)("", {**form.config, "ignore": ignore}, per_row=True)
    config = read_quantization({"quantization_config": kept.config})
    make_fp8(source_of(tmp_path), tmp_path / "fp8", kept, keep=config.ignores)
    make_plain(tmp_path / "fp8", tmp_path / "plain")
    runner = Runner(tmp_path / "fp8")
    assert distance(runner.logits(TOKENS), Runner(tmp_path / "plain").logits(TOKENS)) <= LOGITS_TOLERANCE
    quantized = {name for name, module in runner.model.named_modules() if getattr(module, "quantized", False)}
    assert "model.layers.0.mlp.down_proj" not in quantized
    assert "model.layers.1.mlp.down_proj" not in quantized
    assert {"model.layers.1.mlp.gate_up_proj", "model.layers.2.mlp.down_proj"} <= quantized


def damage(folder, **changes):
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{NAME}.weight_scale": None}, rf"missing \(1\): {NAME}.weight_scale"),
        ({f"{NAME}.input_scale": torch.ones(())}, rf"unexpected \(1\): {NAME}.input_scale in"),
        ({f"{NAME}.weight_scale": torch.ones(7)}, rf"{NAME}.weight_scale in .* is \[7\], should be one number or"),
        ({f"{NAME}.weight": torch.ones(96, 96)}, "is stored as F32, but config.json says FP8"),
        ({"lm_head.weight": torch.ones(97, 96).to(torch.float8_e4m3fn)}, "names no quantisation of it"),
        ({f"{NAME}.weight_scale": torch.tensor(float("nan"))}, f"{NAME}.weight_scale holds a scale that is no finite"),
    ],
    ids=["no scale", "a scale of inputs", "too many scales", "no FP8", "an FP8 head", "NaN"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, says):
    make_fp8(source_of(tmp_path), tmp_path / "fp8", DYNAMIC)
    damage(tmp_path / "fp8", **changes)
    with pytest.raises(ValueError, match=says):
        Runner(tmp_path / "fp8")


def test_weights_that_are_not_finite_cannot_be_quantised(tmp_path):
    source = source_of(tmp_path)
    damage(source, **{f"{NAME}.weight": torch.full((96, 96), float("inf"))})
    with pytest.raises(ValueError, match=f"{NAME}.weight holds numbers that are not finite"):
        Runner(source, quantization="fp8")


def test_a_config_that_says_fp8_of_other_weights_is_refused_before_anything_is_loaded(tmp_path):
    source = source_of(tmp_path)
    path = source / "config.json"
    values = {**json.loads(path.read_text()), "quantization_config": dict(DYNAMIC.config)}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"missing \(21\): .*weight_scale") as caught:
        Runner(source)
    assert "is stored as F32, but config.json says FP8" in str(caught.value)


def test_headers_are_checked_with_the_quantisation(tmp_path):
    from atom_core.checkpoint import read_config_json

    make_fp8(source_of(tmp_path), tmp_path / "fp8", DYNAMIC)
    hf = read_config_json(tmp_path / "fp8")
    check_files(read_model_config(hf), tmp_path / "fp8", 2, read_quantization(hf))
