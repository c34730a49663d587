"""The table of architectures."""

from __future__ import annotations

import pytest

from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.draft import DraftModel
from atom_core.models.registry import DRAFTS, MODELS, load_draft_class, load_model_class, supported_architectures


@pytest.mark.parametrize("architecture", supported_architectures())
def test_every_entry_is_a_model_of_that_name(architecture):
    model_class = load_model_class(architecture)
    assert issubclass(model_class, DecoderForCausalLM)
    assert model_class.__name__ == architecture == MODELS[architecture].architecture


@pytest.mark.parametrize("architecture", DRAFTS)
def test_every_draft_is_one_of_a_model_that_there_is(architecture):
    draft_class = load_draft_class(architecture)
    assert issubclass(draft_class, DraftModel)
    assert draft_class.__name__ == DRAFTS[architecture][1]
    assert issubclass(load_model_class(architecture), draft_class.family())


def test_an_unknown_architecture_is_an_error_that_lists_the_known():
    with pytest.raises(
        ValueError, match=r"'GPT5ForCausalLM' is not supported; supported: .*LlamaForCausalLM, .*Qwen3For"
    ):
        load_model_class("GPT5ForCausalLM")


def test_the_list_is_sorted():
    assert list(supported_architectures()) == sorted(MODELS)
