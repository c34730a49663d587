"""A norm and the router behind it in one kernel on this GPU: against float64, in a chain, in graphs."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_router.triton_kernel import TritonNormedRouter
from atom_core.kernels.rms_norm.reference import rms_norm
from tests.gpu.test_moe import GPU, OVERLAP

EPS = 1e-6
TOKENS = [1, 2, 5, 16]


def operands(tokens, num_experts, hidden, dtype=torch.bfloat16, wide=False):
    torch.manual_seed(tokens)
    padded = torch.full((tokens, hidden + 8), float("nan"), dtype=dtype, device=GPU)
    padded[:, :hidden] = 3 * torch.randn(tokens, hidden, device=GPU)
    weight = (torch.randn(num_experts, hidden, device=GPU) / hidden**0.5).to(torch.float32 if wide else dtype)
    router = Operands(weight, torch.randn(num_experts, device=GPU).to(weight.dtype), float32_result=True)
    return padded[:, :hidden], torch.rand(hidden, device=GPU).to(dtype) + 0.5, router


@pytest.mark.parametrize("num_experts", [8, 60, 128, 256, 384])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", [2048, 2880, 7168])
@pytest.mark.parametrize("wide", [False, True], ids=["router in the model's dtype", "router in float32"])
def test_it_is_each_op_by_itself(num_experts, tokens, hidden, wide):
    x, norm, router = operands(tokens, num_experts, hidden, wide=wide)
    normed, logits = TritonNormedRouter(OVERLAP)(x, norm, EPS, router)
    exact = rms_norm(x.double(), norm.double(), EPS, None)[0]
    torch.testing.assert_close(normed.double(), exact, rtol=2**-8, atol=1e-6)
    wanted = exact @ router.weight.double().T + router.bias.double()
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_outputs", [16, 64, 96])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", [2048, 5120])
def test_it_quantises_as_the_norm_by_itself(num_outputs, tokens, hidden):
    x, norm, gates = operands(tokens, num_outputs, hidden)
    kernel = TritonNormedRouter(OVERLAP)
    normed, wanted_gates = kernel(x, norm, EPS, gates)
    quantized, found_gates = kernel.quantized(x, norm, EPS, gates, InputForm(E4M3, group=128))
    wanted, wanted_scales = quantize_groups(normed, E4M3, OVERLAP, group=128)
    # Compiled by itself, the same sum may be rounded elsewhere.
    torch.testing.assert_close(found_gates, wanted_gates, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(quantized.scales, wanted_scales, rtol=2**-7, atol=0)
    assert (quantized.values.float() != wanted.float()).float().mean() < 1e-3


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_tokens_logits_are_those_it_has_alone(tokens):
    x, norm, router = operands(tokens, 128, 2048)
    kernel = TritonNormedRouter(OVERLAP)
    together = kernel(x, norm, EPS, router)
    for token in range(tokens):
        for found, of_all in zip(kernel(x[token : token + 1], norm, EPS, router), together, strict=True):
            assert torch.equal(found[0], of_all[token])


@pytest.mark.parametrize(("num_experts", "hidden"), [(128, 2048), (256, 7168)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_many_in_a_graph_follow_each_other(num_experts, hidden, tokens):
    """Each norms what the one in front has normed, and may start before that is done."""
    x, norm, router = operands(tokens, num_experts, hidden)
    kernel = TritonNormedRouter(OVERLAP)

    def chain(x):
        found = []
        for turn in range(60):
            x, logits = kernel(x.roll(1, 0) if turn % 3 == 0 else x, norm, EPS, router)
            found.append(logits)
        return [*found, x]

    given = x.clone()
    chain(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(given)
    for turn in range(3):
        given.copy_(torch.randn_like(given) + turn)
        wanted = chain(given)
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
