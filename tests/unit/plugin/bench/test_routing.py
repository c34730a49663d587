"""Tokens of a timed step go to given experts: right ones for a router, the same in each run, of each mixture's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.moe_routing.reference import route
from atom_core.models.read_config import read_model_config
from atom_core.standalone import build_runtime, random_model
from atom_core.types import RoutingConfig
from atom_plugin.bench.batches import MAX_MODEL_LEN
from atom_plugin.bench.models import CONFIGS
from atom_plugin.bench.routing import GivenExperts, given_experts, send_to_given_experts
from atom_plugin.bench.step import decoding

PLAIN = RoutingConfig(64, 6, "softmax", renormalize=False)
GROUPED = RoutingConfig(64, 6, "sigmoid", renormalize=True, num_groups=8, top_groups=3)


@pytest.mark.parametrize("routing", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_each_token_goes_to_experts_that_a_router_may_choose(routing):
    found = given_experts(routing, 200, seed=0)
    assert found.shape == (200, 6)
    assert all(len(set(chosen)) == 6 for chosen in found.tolist())
    assert set(found.flatten().tolist()) == set(range(64)), "and all are chosen by some"
    if routing.num_groups > 1:
        assert max(len(set(chosen)) for chosen in (found // 8).tolist()) <= 3
    assert torch.equal(found, given_experts(routing, 200, seed=0))
    assert not torch.equal(found, given_experts(routing, 200, seed=1))


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("tokens", [1, 5, 1027])
def test_weights_are_the_routers_and_shared_experts_stay(tokens, shared):
    routing = replace(PLAIN, shared=shared)
    given = given_experts(routing, 1027, seed=0)
    choose = GivenExperts(lambda logits, correction: route(logits, correction, routing), given)
    logits = torch.randn(tokens, 64)
    weights, experts = choose(logits, None)
    wanted, chosen = route(logits, None, routing)
    assert torch.equal(weights, wanted)
    assert experts.dtype == chosen.dtype
    assert torch.equal(experts[:, 6:], chosen[:, 6:])
    assert torch.equal(experts[:, :6], given_experts(PLAIN, 1027, 0)[:tokens])
    assert torch.equal(choose(-logits, None)[1], experts)


def test_every_mixture_of_a_step_has_its_own():
    tiny = {
        **CONFIGS["qwen3-30b-a3b"],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
    }
    config = read_model_config(tiny)
    runtime = build_runtime(torch.device("cpu"), torch.float32, MAX_MODEL_LEN)
    model = random_model(config, runtime)
    send_to_given_experts(model, config, 3)
    with torch.inference_mode():
        decoding(model, config, runtime, 3, 20)()
    first, second = (
        layer.feed_forward.router_layer.select(torch.randn(3, 128), None)[1] for layer in model.model.layers
    )
    assert first.shape == second.shape == (3, 8)
    assert not torch.equal(first, second)
