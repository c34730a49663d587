"""A head in float32 on a model of 16 bits: the product of widened factors, and logits that are not rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.checkpoint import Checkpoint, config_of
from atom_core.layers.embedding import LMHead
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.runtime import SingleRank
from atom_core.standalone import build_runtime, finalize
from atom_core.weights import load_weights
from tests.unit.core.families import ALL_FAMILIES
from tests.unit.core.hugging_face import make_config, make_model
from tests.unit.core.ranks import on_ranks

ONE = SingleRank()


def model_of(folder, dtype, head_dtype, group=ONE, kernels=None):
    config = read_model_config(config_of(folder))
    runtime = build_runtime(torch.device("cpu"), dtype, 16, kernels)
    runtime = replace(runtime, head_dtype=head_dtype, tensor_parallel=group)
    model = load_model_class(config.architecture)(config, runtime)
    load_weights(model, Checkpoint.open(folder).load())
    finalize(model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("family", ALL_FAMILIES, ids=str)
def test_logits_are_the_float32_product_of_hidden_states_as_they_are(tmp_path, family, tied, dtype):
    make_model(tmp_path, make_config(family, tie_word_embeddings=tied))
    model = model_of(tmp_path, dtype, torch.float32)
    hidden = torch.randn(5, model.config.hidden_size).to(dtype)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    weight = Checkpoint.open(tmp_path).tensor(name).to(dtype)
    expected = hidden.double() @ weight.double().T
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-5)
    # Which the model's own dtype is far from.
    rounded = model_of(tmp_path, dtype, None).logits(hidden)
    assert rounded.dtype == dtype
    assert (rounded.double() - expected).abs().max() > 1e-4
    # The vocabulary's 97 rows are 49 and 48 on two ranks.
    for found in on_ranks(2, lambda group: model_of(tmp_path, dtype, torch.float32, group).logits(hidden)):
        assert torch.equal(found, logits) or (found - logits).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_where_it_is_the_models_own_dtype_nothing_changes(tmp_path, dtype):
    make_model(tmp_path, make_config(ALL_FAMILIES[0]))
    plain, named = (model_of(tmp_path, dtype, head_dtype) for head_dtype in (None, dtype))
    hidden = torch.randn(3, plain.config.hidden_size).to(dtype)
    assert torch.equal(plain.logits(hidden), named.logits(hidden))


def test_of_a_dtype_that_is_neither_there_is_none():
    runtime = replace(build_runtime(torch.device("cpu"), torch.float32, 16), head_dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="in float32"):
        LMHead(8, 8, runtime)
