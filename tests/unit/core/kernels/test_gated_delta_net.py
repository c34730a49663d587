"""Gated DeltaNet's reference: Transformers' own functions, chunks of any size, and states that are carried on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_own

from atom_core.kernels.gated_delta_net.reference import (
    causal_conv,
    chunked_gated_delta_rule,
    gated_delta_rule,
    gated_rms_norm,
    gates,
)

KEY_HEADS, VALUE_HEADS, K, V = 2, 6, 16, 24
LENGTHS = (1, 2, 63, 64, 65, 200)


def inputs(tokens, seed=0):
    """q, k, v, g, beta and a state; some tokens forget nearly all, as trained gates may."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    a_log, dt_bias = random(VALUE_HEADS).abs(), random(VALUE_HEADS)
    a = random(tokens, VALUE_HEADS) + 30.0 * (torch.rand(tokens, 1, generator=generator) > 0.95)
    g, beta = gates(a, random(tokens, VALUE_HEADS), a_log, dt_bias)
    q, k = random(tokens, KEY_HEADS, K), random(tokens, KEY_HEADS, K)
    return q, k, random(tokens, VALUE_HEADS, V), g, beta, 0.3 * random(VALUE_HEADS, V, K)


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked_gated_delta_rule])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_it_is_what_transformers_computes(rule, tokens):
    q, k, v, g, beta, state = inputs(tokens)
    shared = VALUE_HEADS // KEY_HEADS
    expected, last = transformers_own.torch_recurrent_gated_delta_rule(
        *(x.repeat_interleave(shared, 1)[None] for x in (q, k)),
        v[None],
        g[None],
        beta[None],
        initial_state=state.mT[None].contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, after = rule(q, k, v, g, beta, state)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, last[0].mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_chunks_of_any_size_are_the_rule_token_by_token(chunk):
    given = inputs(200, seed=1)
    for found, expected in zip(chunked_gated_delta_rule(*given, chunk=chunk), gated_delta_rule(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked_gated_delta_rule])
@pytest.mark.parametrize("cut", [1, 63, 64, 130])
def test_a_state_that_is_carried_on_is_that_of_the_whole(rule, cut):
    *tokens, state = inputs(150, seed=2)
    whole, last = rule(*tokens, state)
    first, between = rule(*(x[:cut] for x in tokens), state)
    second, after = rule(*(x[cut:] for x in tokens), between)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, last, rtol=1e-4, atol=1e-5)


def test_padding_with_neither_decay_nor_beta_leaves_the_state_alone():
    q, k, v, _, _, state = inputs(5)
    nothing = torch.zeros(5, VALUE_HEADS)
    for rule in (gated_delta_rule, chunked_gated_delta_rule):
        torch.testing.assert_close(rule(q, k, v, nothing, nothing, state)[1], state, rtol=0, atol=0)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 9])
def test_the_convolution_is_torchs_and_its_state_is_carried_on(cut):
    torch.manual_seed(0)
    conv = nn.Conv1d(8, 8, 4, groups=8, padding=3, bias=False)
    x, weight, empty = torch.randn(10, 8), conv.weight.detach()[:, 0], torch.zeros(3, 8)
    expected = nn.functional.silu(conv(x.t()[None]))[0, :, :10].t()
    first, state = causal_conv(x[:cut], weight, empty)
    second, last = causal_conv(x[cut:], weight, state)
    torch.testing.assert_close(torch.cat((first, second)), expected)
    assert torch.equal(last, x[-3:])


def test_the_gated_norm_is_transformers_own():
    torch.manual_seed(0)
    norm = transformers_own.Qwen3NextRMSNormGated(V, eps=1e-6)
    norm.weight.data.normal_()
    x, z = torch.randn(2, 5, VALUE_HEADS, V)
    torch.testing.assert_close(gated_rms_norm(x, z, norm.weight, 1e-6), norm(x, z))
