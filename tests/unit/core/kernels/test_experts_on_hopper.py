"""Both products of few tokens' experts on Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.experts import ExpertWeights
from atom_core.kernels.experts.blocked_layout import to_blocked_layout
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.grouped import LocalExperts
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from tests.gluon_on_cpu import on_cpu

DTYPE = torch.bfloat16


@pytest.fixture
def kernels(monkeypatch):
    """The module, whose kernel a CPU runs on four multiprocessors."""
    with on_cpu() as modules:
        found = modules["atom_core.kernels.experts.few_tokens_hopper"]
        monkeypatch.setattr(found, "multiprocessors", lambda device: 4)
        yield found


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize("blocked", [False, True], ids=["as loaded", "blocked"])
@pytest.mark.parametrize(("tokens", "first", "count"), [(2, 0, 6), (5, 2, 3), (16, 0, 6)])
def test_each_expert_is_multiplied_by_its_tokens(kernels, tokens, first, count, blocked, bias):
    torch.manual_seed(0)
    hidden, size, top_k, experts = 256, 192, 3, 6
    layer = ExpertWeights(
        (torch.randn(count, 2 * size, hidden) / hidden**0.5).to(DTYPE),
        (torch.randn(count, hidden, size) / size**0.5).to(DTYPE),
        *((torch.randn(count, 2 * size).to(DTYPE), torch.randn(count, hidden).to(DTYPE)) if bias else ()),
    )
    x = torch.full((tokens, hidden + 16), torch.nan, dtype=DTYPE)
    x[:, :hidden] = torch.randn(tokens, hidden)
    x = x[:, :hidden]
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, top_k)
    local = LocalExperts(first, count, top_k)
    used = layer
    if blocked:
        used = layer._replace(gate_up=layer.gate_up.clone(), down=layer.down.clone(), blocked=True)
        to_blocked_layout(used.gate_up)
        to_blocked_layout(used.down)
    between = torch.full((tokens * top_k, size), torch.nan, dtype=DTYPE)
    kernels.gate_up_of_few(x, chosen, used, between, local, ACTIVATIONS["silu"], MAX_TOKENS, False)
    out = torch.full((tokens * top_k, hidden), torch.nan)
    kernels.down_of_few(between, chosen, weights, used, out, local, MAX_TOKENS, False)
    for place, expert in enumerate((chosen - first).flatten().tolist()):
        if not 0 <= expert < count:
            assert between[place].isnan().all()
            assert out[place].isnan().all()
            continue
        both = x[place // top_k].double() @ layer.gate_up[expert].double().T
        both = (both + (layer.gate_up_bias[expert].double() if bias else 0)).to(DTYPE).double()
        wanted = torch.nn.functional.silu(both[:size]) * both[size:]
        torch.testing.assert_close(between[place].double(), wanted, rtol=2**-7, atol=2**-7)
        wanted = between[place].double() @ layer.down[expert].double().T
        wanted = (wanted + (layer.down_bias[expert].double() if bias else 0)) * weights.flatten()[place].double()
        torch.testing.assert_close(out[place].double(), wanted, rtol=2**-7, atol=2**-7)
