"""vLLM finds our mixtures where it looks for its own, and writes down the experts that they choose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from atom_core.models.read_config import read_model_config
from atom_plugin.vllm import attention, routing
from atom_plugin.vllm.routed_experts import RoutingSources, returns_routed_experts
from tests.unit.core.hugging_face import make_config
from tests.unit.core.models.test_qwen3_moe import FAMILY

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

TOKENS, TOP_K = 5, 2


def mixture():
    """Three layers, of which the second is none."""
    return read_model_config(make_config(FAMILY, mlp_only_layers=[1]))


def test_each_layers_experts_are_written_to_its_place(monkeypatch):
    sources = RoutingSources(mixture())
    model = nn.Module()
    model.routed_experts = sources
    capturer = RoutedExpertsCapturer.__new__(RoutedExpertsCapturer)
    capturer.device_buffer = torch.zeros(8, 3, TOP_K, dtype=torch.int32)
    capturer.dp_rank, capturer.tp_size = 0, 1
    context = SimpleNamespace(dp_metadata=None, batch_descriptor=None)
    monkeypatch.setitem(RoutedExpertsCapturer.capture.__globals__, "get_forward_context", lambda: context)
    chosen = {index: torch.randint(8, (TOKENS, TOP_K), dtype=torch.int32) for index in (0, 2)}
    sources(0, chosen[0])  # before vLLM has room for them
    bind_routed_experts_capturer(model, capturer)
    for index, experts in chosen.items():
        sources(index, experts)
    assert torch.equal(capturer.device_buffer[:TOKENS, 0], chosen[0])
    assert torch.equal(capturer.device_buffer[:TOKENS, 2], chosen[2])
    assert not capturer.device_buffer[:, 1].any()
    assert not capturer.device_buffer[TOKENS:].any()


def asking(**fields):
    """A configuration of this vLLM's that asks for them."""
    flag = {"enable_return_routed_experts": True}
    since_031 = hasattr(__import__("vllm.config", fromlist=["config"]), "AuxOutputConfig")
    return SimpleNamespace(
        model_config=SimpleNamespace(**({} if since_031 else flag)),
        **({"aux_output_config": SimpleNamespace(**flag)} if since_031 else {}),
        **fields,
    )


def test_the_flag_is_found_and_what_is_compiled_is_refused(monkeypatch):
    config = asking(compilation_config=SimpleNamespace(mode=3))
    assert returns_routed_experts(config)
    routing._check_routed_experts(config, mixture())
    monkeypatch.setattr(attention, "is_compiled", lambda vllm_config: True)
    with pytest.raises(ValueError, match="--enable-return-routed-experts with a model that is compiled"):
        routing._check_routed_experts(config, mixture())
