"""Qwen3-Next's and Qwen3.5's shared expert with its gate, among the routed experts and apart, in whole models."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from atom_core.kernels import select
from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS
from tests.unit.core.hugging_face import LOGITS_TOLERANCE, distance, logits, make_config, make_model, random_tokens
from tests.unit.core.models.test_fp8_experts import ExactExperts, ExactLinear
from tests.unit.core.models.test_qwen3_5 import MOE, NEXT, make_quantized
from tests.unit.core.ranks import data_parallel_logits, tensor_parallel_logits
from tests.unit.core.test_spellings import fused, respell

TOKENS = random_tokens(24)
GATE = "model.layers.1.mlp.shared_expert_gate.weight"
HOW = {"routed": "among the routed ones", "separate": "apart"}
every_family = pytest.mark.parametrize("family", [NEXT, MOE], ids=str)
every_way = pytest.mark.parametrize("how", HOW, ids=HOW.values())
every_format = pytest.mark.parametrize("form", [*FORMATS, *BLOCK_FORMATS], ids=str)


def make(folder, family, **settings):
    """A random checkpoint, and Transformers' model of it."""
    settings = {"num_key_value_heads": 4, "shared_expert_intermediate_size": 80, **settings}
    return make_model(folder, make_config(family, **settings))


def runner_of(folder, how):
    runner = Runner(folder, kernels={"shared_experts": how})
    assert (runner.model.model.layers[0].mlp.shared_layer is None) == (how == "routed")
    return runner


@pytest.fixture
def where_it_can(monkeypatch):
    """They are among the routed ones wherever they can be, as on a GPU."""
    monkeypatch.setitem(select.PRIORITY, "cpu", ("framework", "torch", "widened", "reference", "routed", "separate"))


@every_way
@every_family
@pytest.mark.parametrize("size", [40, 80])
def test_logits_are_hugging_faces(tmp_path, family, how, size):
    model = make(tmp_path, family, shared_expert_intermediate_size=size)
    assert distance(runner_of(tmp_path, how).logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE


@every_way
@every_family
def test_experts_in_one_tensor_a_matrix(tmp_path, family, how):
    make(tmp_path, family)
    expected = runner_of(tmp_path, how).logits(TOKENS)
    respell(tmp_path, fused)
    assert torch.equal(runner_of(tmp_path, how).logits(TOKENS), expected)


@pytest.mark.usefixtures("where_it_can")
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_ranks_answer_as_one(tmp_path, expert_parallel):
    expected = logits(make(tmp_path, MOE), TOKENS)
    runner = Runner(tmp_path)
    assert runner.model.model.layers[0].mlp.shared_layer is None
    for found in tensor_parallel_logits(runner, tmp_path, TOKENS, 2, expert_parallel=expert_parallel):
        assert distance(found, expected) <= LOGITS_TOLERANCE


@pytest.mark.usefixtures("where_it_can")
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["every expert", "the experts"])
def test_data_parallel_ranks_answer_as_one(tmp_path, expert_parallel):
    model, prompts = make(tmp_path, NEXT), [TOKENS[:9], TOKENS[4:5]]
    for found, prompt in zip(
        data_parallel_logits(Runner(tmp_path), tmp_path, prompts, 1, expert_parallel), prompts, strict=True
    ):
        assert distance(found, logits(model, prompt)) <= LOGITS_TOLERANCE


@every_format
@every_way
def test_fp8_weights_are_those_that_the_checkpoint_stands_for(tmp_path, monkeypatch, request, form, how):
    monkeypatch.setattr("atom_core.kernels.fp8_linear.ReferenceFp8Linear", ExactLinear)
    monkeypatch.setattr("atom_core.kernels.fp8_block_linear.ReferenceFp8BlockLinear", ExactLinear)
    monkeypatch.setattr("atom_core.kernels.fp8_experts.ReferenceFp8Experts", ExactExperts)
    if how == "routed":
        request.getfixturevalue("where_it_can")
    quantized, plain = make_quantized(tmp_path, NEXT, form)
    layer = quantized.model.model.layers[1].mlp
    assert (layer.shared_layer is None) == (how == "routed")
    assert layer.experts.gate_up_proj.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.gate.weight[8:9], load_file(tmp_path / "fp8" / "model.safetensors")[GATE])
    assert distance(quantized.logits(TOKENS), plain.logits(TOKENS)) <= LOGITS_TOLERANCE


@every_way
def test_a_gate_may_come_alone_in_an_update_and_is_told_by_its_name(tmp_path, how):
    model, runner = make(tmp_path, MOE), runner_of(tmp_path, how)
    gate = 2.0 * load_file(tmp_path / "model.safetensors")[GATE]
    runner.weights.update([(GATE, gate)], "a list", whole=False)
    model.model.layers[1].mlp.shared_expert_gate.weight.data.copy_(gate)
    assert distance(runner.logits(TOKENS), logits(model, TOKENS)) <= LOGITS_TOLERANCE
    assert torch.equal(runner.weights.read(GATE), gate)


@every_way
@pytest.mark.parametrize("damage", ["missing", "misshapen", "dtype"])
def test_a_gate_that_does_not_fit_is_named(tmp_path, damage, how):
    make(tmp_path, NEXT)

    def change(tensors):
        gate = tensors.pop(GATE)
        if damage == "misshapen":
            tensors[GATE] = gate[0].clone()
        elif damage == "dtype":
            tensors[GATE] = gate.to(torch.float8_e4m3fn)
        return tensors

    respell(tmp_path, change)
    says = {
        "missing": rf"missing \(1\): {GATE}",
        "misshapen": rf"misshapen \(1\): {GATE} .*is \[96\], should be \[1, 96\]",
        "dtype": rf"misshapen \(1\): {GATE} .*is stored as F8_E4M3",
    }
    with pytest.raises(ValueError, match=says[damage]):
        runner_of(tmp_path, how)
