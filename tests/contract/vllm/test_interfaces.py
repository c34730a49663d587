"""Our layer, backends, metadata builder and models fill vLLM's interfaces: nothing abstract is left, no override
takes other arguments than what it overrides.
"""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from atom_core.models.registry import DRAFTS, load_draft_class, supported_architectures
from atom_plugin.vllm import ARCHITECTURE_PREFIX, attention_backends, drafts, models
from atom_plugin.vllm.attention import VllmLinearAttention, VllmPagedAttention
from atom_plugin.vllm.states import AtomStateBackend, AtomStateGraphBackend, AtomStateMetadataBuilder
from tests.integration.vllm.inspected import STAND_INS, THEIR_DRAFTS

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

BACKENDS = (
    attention_backends.AtomAttentionBackend,
    attention_backends.AtomGraphAttentionBackend,
    attention_backends.AtomCpuAttentionBackend,
    attention_backends.AtomMLABackend,
    attention_backends.AtomGraphMLABackend,
)
OURS = (
    *((backend, AttentionBackend) for backend in BACKENDS),
    (attention_backends.AtomMetadataBuilder, AttentionMetadataBuilder),
    (attention_backends.AtomGraphMetadataBuilder, AttentionMetadataBuilder),
    (VllmPagedAttention, AttentionLayerBase),
    (VllmLinearAttention, MambaBase),
    (AtomStateBackend, AttentionBackend),
    (AtomStateGraphBackend, AttentionBackend),
    (AtomStateMetadataBuilder, GDNAttentionMetadataBuilder),
)

each_class = pytest.mark.parametrize(("ours", "theirs"), OURS, ids=lambda cls: cls.__name__)


@each_class
def test_nothing_abstract_is_left(ours, theirs):
    assert issubclass(ours, theirs)
    assert not getattr(ours, "__abstractmethods__", ())


@pytest.mark.parametrize("backend", [*BACKENDS, AtomStateBackend, AtomStateGraphBackend], ids=lambda cls: cls.__name__)
def test_a_backend_without_an_impl_answers_that_contexts_are_not_parallel(backend):
    assert not backend.supports_pcp()
    assert not backend.supports_dcp()


@each_class
def test_an_override_takes_what_it_overrides(ours, theirs):
    for name, method in inspect.getmembers(ours, callable):
        inherited = getattr(theirs, name, None)
        if name.startswith("__") or inherited is None or method == inherited:
            continue
        mine, base = (list(inspect.signature(it).parameters) for it in (method, inherited))
        assert mine[: len(base)] == base, f"{ours.__name__}.{name}"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda cls: cls.__name__)
def test_a_backend_declares_by_methods_that_vllm_has(backend):
    declared = {
        name for base in backend.__mro__ if base.__module__ == attention_backends.__name__ for name in vars(base)
    }
    unknown = {name for name in declared if not name.startswith("_")} - set(dir(AttentionBackend))
    assert not unknown
    assert all(isinstance(size, MultipleOf) for size in backend.get_supported_kernel_block_sizes())
    assert backend.supported_kv_cache_layouts()


def test_only_kernels_without_lengths_in_their_launches_are_captured_whole():
    assert attention_backends.AtomGraphMetadataBuilder._cudagraph_support == AttentionCGSupport.ALWAYS
    assert attention_backends.AtomMetadataBuilder._cudagraph_support == AttentionCGSupport.NEVER


@pytest.mark.parametrize("architecture", supported_architectures())
def test_every_architecture_has_a_model_for_vllm(architecture):
    model_class = getattr(models, f"Atom{architecture}")
    assert issubclass(model_class, models.AtomForCausalLM)
    assert isinstance(model_class.supports_pp, bool)


@pytest.mark.parametrize("name", ["embed_input_ids", "forward", "compute_logits"])
def test_a_model_takes_what_vllm_passes(name):
    ours = inspect.signature(getattr(models.AtomForCausalLM, name)).parameters
    theirs = inspect.signature(getattr(VllmModelForTextGeneration, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)


@pytest.mark.parametrize(("architecture", "draft"), [(name, draft) for name, (_, draft) in DRAFTS.items()])
def test_every_draft_has_a_model_for_vllm(architecture, draft):
    draft_class = getattr(drafts, f"Atom{draft}")
    assert issubclass(draft_class, drafts.AtomDraft)
    assert load_draft_class(draft_class.architecture) is load_draft_class(architecture)


@pytest.mark.parametrize("name", ["embed_input_ids", "forward", "compute_logits"])
def test_a_draft_takes_what_vllms_own_takes(name):
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP

    ours, theirs = (list(inspect.signature(getattr(it, name)).parameters) for it in (drafts.AtomDraft, DeepSeekMTP))
    assert ours == theirs


def test_a_draft_is_of_no_class_that_vllm_expects_two_results_of():
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    told_apart = inspect.getsource(SpecDecodeBaseProposer.model_returns_tuple)
    assert "DeepSeekMTPModel" in told_apart
    assert not any(f"Atom{draft}" in told_apart for _, draft in DRAFTS.values())


def test_a_model_is_built_from_a_configuration_and_a_prefix():
    inspect.signature(models.AtomForCausalLM.__init__).bind("self", vllm_config=VllmConfig, prefix="")


def test_the_op_is_registered_with_what_it_writes_to():
    import torch

    schema = torch.ops.atom.token_mixer.default._schema
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    assert [argument.name for argument in schema.arguments] == ["first", "second", "positions", "out", "layer_name"]
    assert written == {"first", "out"}


#: What our classes lack that vLLM's have; vLLM asks since 0.33.
LACKING = (
    {"supports_lora": False} if "supports_lora" in {field.name for field in dataclasses.fields(_ModelInfo)} else {}
)


#: Fields that our classes of a multimodal checkpoint's text have of another value.
OF_IMAGES = re.compile("multimodal|video|mm_")


def found_out(name, monkeypatch):
    """What vLLM finds out about a class of that name."""
    monkeypatch.syspath_prepend(STAND_INS)  # Qwen3.5's imports torchvision
    load_general_plugins()  # ours are registered then
    return _ModelInfo.from_model_cls(ModelRegistry.models[name].load_model_cls())


@pytest.mark.parametrize("architecture", supported_architectures())
def test_vllm_finds_out_the_same_about_our_class_as_about_its_own(architecture, monkeypatch):
    ours = ARCHITECTURE_PREFIX + architecture
    theirs, found = (found_out(name, monkeypatch) for name in (architecture, ours))
    wanted = dataclasses.asdict(dataclasses.replace(theirs, architecture=ours, **LACKING))
    if architecture.endswith("ForConditionalGeneration"):
        wanted |= {"has_inner_state": True}
        wanted |= {name: value for name, value in dataclasses.asdict(found).items() if OF_IMAGES.search(name)}
        assert not found.supports_multimodal
    assert dataclasses.asdict(found) == wanted


@pytest.mark.parametrize("name", dict.fromkeys(name for _, name in DRAFTS.values()))
def test_our_drafts_differ_in_what_routing_says(name, monkeypatch):
    ours = ARCHITECTURE_PREFIX + name
    theirs = found_out(THEIR_DRAFTS[name], monkeypatch)
    wanted = dataclasses.replace(theirs, architecture=ours, supports_pp=False, supports_multimodal=False, **LACKING)
    assert found_out(ours, monkeypatch) == wanted
