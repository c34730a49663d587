"""A model of the core in a framework's class: its names, its weights as they are loaded, and files of these."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from atom_core.layers.parameters import ParameterLayer
from atom_core.standalone import Runner
from atom_plugin.common.shards import PATTERN, check_shards
from atom_plugin.common.wrapped_model import WrappedModel
from tests.unit.core.hugging_face import FAMILIES, make_config, make_model

FILES = PATTERN.format(rank=0, part="*")
NAME = "model.layers.1.self_attn.qkv_proj.weight"
TOKENS = [3, 1, 4, 1, 5]
(QWEN3,) = (family for family in FAMILIES if str(family) == "Qwen3")


class Wrapped(WrappedModel):
    """As the adapters' classes."""

    def __init__(self, core):
        super().__init__()
        self.wrap(core)
        self.model, self.lm_head = core.model, core.lm_head


@pytest.fixture
def runner(tmp_path):
    """A loaded model whose kernels have packed its weights."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("oneDNN packs no bfloat16 on this processor")
    make_model(tmp_path / "model", make_config(QWEN3, tie_word_embeddings=False))
    return Runner(tmp_path / "model", dtype=torch.bfloat16, kernels={"linear": "torch"})


def test_names_are_those_of_checkpoints(runner):
    wrapped = Wrapped(runner.model)
    names = [name for name, _ in wrapped.named_parameters()]
    assert names == [name for name, _ in runner.model.named_parameters()]
    assert NAME in names
    assert wrapped.core is runner.model


def test_the_state_has_weights_as_they_are_loaded(runner):
    wrapped, before = Wrapped(runner.model), runner.logits(TOKENS)
    assert wrapped.get_parameter(NAME).numel() == 0, "packed"
    state = wrapped.state_dict()
    parts = [runner.weights.read(NAME.replace("qkv", part)) for part in "qkv"]
    assert torch.equal(state[NAME].float(), torch.cat(parts))
    assert torch.equal(state[NAME], wrapped.read_parameter(NAME))
    assert wrapped.read_parameter("model.layers.1.self_attn.q_proj.weight") is None
    assert torch.equal(runner.logits(TOKENS), before)


def test_the_state_of_a_model_that_is_not_loaded_is_written_to(runner):
    wrapped = Wrapped(runner.model)
    with wrapped.opened():
        assert wrapped.state_dict()[NAME].data_ptr() == wrapped.get_parameter(NAME).data_ptr()


def test_parameters_have_the_form_in_which_they_are_loaded_for_a_time(runner):
    wrapped, before = Wrapped(runner.model), runner.logits(TOKENS)
    with wrapped.opened():
        assert wrapped.get_parameter(NAME).numel() > 0
    assert wrapped.get_parameter(NAME).numel() == 0
    assert all(it.closed for it in wrapped.modules() if isinstance(it, ParameterLayer))
    assert torch.equal(runner.logits(TOKENS), before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: None, None),
        (lambda it: it.pop(NAME), rf"sharded_state: {re.escape(FILES)} in .* does not fit .*missing \(1\): {NAME}"),
        (lambda it: it.update({NAME: it[NAME][:-2]}), rf"misshapen \(1\): {NAME} is \[\d+, \d+\], should be"),
        (lambda it: it.update({NAME: it[NAME].float()}), f"{NAME} is stored as F32, should be BF16"),
        (lambda it: it.update({"core.x": it[NAME].clone()}), r"unexpected \(1\): core.x in model-rank-0-part-0"),
        (lambda it: it.clear(), "has no file model-rank-0"),
    ],
    ids=["right", "missing", "misshapen", "of another dtype", "unexpected", "no file"],
)
def test_files_of_a_rank_are_compared_with_the_model(runner, tmp_path, change, says):
    wrapped = Wrapped(runner.model)
    state = {name: it.clone() for name, it in wrapped.state_dict().items()}
    change(state)
    if state:
        save_file(state, tmp_path / PATTERN.format(rank=0, part=0))
    with wrapped.opened():
        if says is None:
            check_shards(wrapped, tmp_path, FILES)
            return
        with pytest.raises(ValueError, match=says):
            check_shards(wrapped, tmp_path, FILES)


def test_files_have_a_table_that_embedding_and_head_share_once(tmp_path):
    make_model(tmp_path / "model", make_config(QWEN3, tie_word_embeddings=True))
    wrapped = Wrapped(Runner(tmp_path / "model").model)
    state = wrapped.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    del state["model.embed_tokens.weight"]
    save_file({name: it.clone() for name, it in state.items()}, tmp_path / PATTERN.format(rank=0, part=0))
    check_shards(wrapped, tmp_path, FILES)
