"""The cases of linear attention (Gated DeltaNet): decoding requests, and prompts from their first token on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from atom_core.batch import Batch, HostLengths, States
from atom_core.cache import StateView
from atom_core.config import GatedDeltaNetConfig, ModelConfig
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.reference import (
    CHUNK,
    causal_conv,
    chunked_gated_delta_rule,
    gated_delta_rule,
    gated_rms_norm,
    gates,
)
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_plugin.bench.cases import Bench, Case, Run
from atom_plugin.bench.vllm_delta_kernels import gated_delta_net

#: Requests with one new token each, and (requests, tokens each) of prompts.
DECODES = (1, 8, 64, 256)
PREFILLS = ((1, 128), (1, 2048), (1, 8192), (8, 2048))
_STATE_SIZE, _EPS = 4, 1e-6


@dataclass(frozen=True)
class _Batch:
    """Equal requests of ``tokens`` new tokens each, all of a layer's heads; one token goes on from a state."""

    layer: GatedDeltaNetConfig
    requests: int
    tokens: int

    @property
    def values(self) -> int:
        return self.layer.num_value_heads * self.layer.value_dim

    @property
    def num_tokens(self) -> int:
        return self.requests * self.tokens

    def num_bytes(self, itemsize: int) -> int:
        """States and the convolution's inputs are written, and read where there are any."""
        it, times = self.layer, 2 if self.tokens == 1 else 1
        row = it.channels + 2 * self.values + 2 * it.num_value_heads
        kept = _STATE_SIZE * it.state_elements + (it.conv_width - 1) * it.channels * itemsize
        return self.num_tokens * row * itemsize + times * self.requests * kept

    def num_operations(self) -> int:
        """Of products, in chunks where there are many tokens."""
        it = self.layer
        if self.tokens == 1:
            return 6 * self.requests * it.state_elements
        within = CHUNK * (3 * it.key_dim + 2 * it.value_dim)
        return 2 * self.num_tokens * it.num_value_heads * (within + 3 * it.key_dim * it.value_dim)

    def inputs(self, bench: Bench) -> tuple[torch.Tensor, torch.Tensor, GatedDeltaNetWeights]:
        """qkvz, ba, and weights."""
        it = self.layer
        qkvz = bench.random(self.num_tokens, it.channels + self.values, seed=0)
        ba = bench.random(self.num_tokens, 2 * it.num_value_heads, seed=1)
        weights = GatedDeltaNetWeights(
            bench.random(it.channels, it.conv_width, seed=2, scale=0.5),
            bench.random(it.num_value_heads, seed=3).float(),
            bench.random(it.num_value_heads, seed=4).float(),
            1.0 + bench.random(it.value_dim, seed=5, scale=0.1),
            _EPS,
        )
        return qkvz, ba, weights

    def caches(self, bench: Bench, copies: int) -> list[StateView]:
        """Each request has the slot behind its number."""
        it, slots = self.layer, self.requests + 1
        conv = bench.random(slots, it.conv_width - 1, it.channels, seed=6)
        states = bench.random(slots, it.num_value_heads, it.value_dim, it.key_dim, seed=7, scale=0.1).float()
        return [StateView((conv.clone(), states.clone())) for _ in range(copies)]

    def batch(self, bench: Bench) -> Batch:
        count, device = self.requests, bench.device
        starts = list(range(0, self.num_tokens + 1, self.tokens))
        decoding = count if self.tokens == 1 else 0
        length = self.tokens + (decoding > 0)  # a request that decodes has a state
        return Batch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.full((count,), length, dtype=torch.int32, device=device),
            num_requests=count,
            num_tokens=self.num_tokens,
            max_query_len=self.tokens,
            max_seq_len=length,
            num_decode_requests=decoding,
            num_decode_tokens=decoding,
            states=States(torch.arange(1, count + 1, dtype=torch.int32, device=device)[:, None]),
            host=HostLengths(starts, [length] * count),
        )


def gated_delta_net_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """One layer's convolution, rule and gated norm; none for models without such layers."""
    layer = next((it.mixer for it in config.layers if isinstance(it.mixer, GatedDeltaNetConfig)), None)
    if layer is None:
        return
    heads = f"{layer.num_value_heads} heads"
    for requests, tokens in (*((count, 1) for count in DECODES), *PREFILLS):
        inputs = _Batch(layer, requests, tokens)
        yield Case(
            "gated_delta_net",
            f"decode {requests}, {heads}" if tokens == 1 else f"prefill {requests} x {tokens}, {heads}",
            num_bytes=inputs.num_bytes(itemsize),
            num_operations=inputs.num_operations(),
            contenders={
                "atom": partial(_ours, inputs),
                "torch": partial(_torch, inputs, None),
                "vllm": partial(_vllm, inputs),
            },
            exact=(partial(_torch, inputs, torch.float32),),
        )


def _ours(inputs: _Batch, bench: Bench, copies: int) -> Run:
    it = inputs.layer
    sizes = it.num_key_heads, it.num_value_heads, it.key_dim, it.value_dim, it.conv_width
    kernel = bench.kernels.select(GATED_DELTA_NET, GatedDeltaNetSpec(*sizes, bench.dtype, torch.float32))
    (qkvz, ba, weights), batch, caches = inputs.inputs(bench), inputs.batch(bench), inputs.caches(bench, copies)
    out = qkvz.new_empty(inputs.num_tokens, it.num_value_heads, it.value_dim)

    def run(index: int) -> torch.Tensor:
        kernel(qkvz, ba, weights, caches[index], batch, out)
        return out

    return run


def _vllm(inputs: _Batch, bench: Bench, copies: int) -> Run:
    (qkvz, ba, weights), batch, caches = inputs.inputs(bench), inputs.batch(bench), inputs.caches(bench, copies)
    assert batch.states is not None
    where = batch.query_start_loc, batch.states.slots[:, 0]
    rule = gated_delta_net(inputs.layer, *where, decodes=inputs.tokens == 1)
    return lambda index: rule(qkvz, ba, weights, caches[index])


def _torch(inputs: _Batch, dtype: torch.dtype | None, bench: Bench, copies: int) -> Run:
    """The reference's functions, with a request's heads beside those of the others."""
    it, count, values = inputs.layer, inputs.requests, inputs.values
    (qkvz, ba, weights), caches = inputs.inputs(bench), inputs.caches(bench, copies)
    taps, norm = weights.conv.repeat(count, 1), weights.norm
    if dtype is not None:
        qkvz, ba, taps, norm = (x.to(dtype) for x in (qkvz, ba, taps, norm))
    rule = gated_delta_rule if inputs.tokens == 1 else chunked_gated_delta_rule

    def by_token(x: torch.Tensor) -> torch.Tensor:
        """``[R * T, n]`` as ``[T, R, n]``."""
        return x.view(count, inputs.tokens, -1).transpose(0, 1)

    def run(index: int) -> torch.Tensor:
        conv, states = (x[1:] for x in caches[index].tensors)
        x, z = torch.split(by_token(qkvz), [it.channels, values], -1)
        b, a = torch.split(by_token(ba), it.num_value_heads, -1)
        window, state = conv.to(qkvz.dtype).transpose(0, 1).flatten(1), states.flatten(0, 1)
        if inputs.tokens > 1:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        mixed, last = causal_conv(x.flatten(1), taps, window)
        keys = it.num_key_heads * it.key_dim
        q, k, v = torch.split(mixed.view(inputs.tokens, count, -1), [keys, keys, values], -1)
        q, k = (side.reshape(inputs.tokens, -1, it.key_dim) for side in (q, k))
        v = v.reshape(inputs.tokens, -1, it.value_dim)
        g, beta = gates(a, b, weights.a_log, weights.dt_bias)
        found, state = rule(q, k, v, g.flatten(1), beta.flatten(1), state)
        conv.copy_(last.view(len(last), count, -1).transpose(0, 1))
        states.copy_(state.view_as(states))
        normed = gated_rms_norm(found, z.reshape(found.shape), norm, _EPS)
        return normed.view(inputs.tokens, count, -1, it.value_dim).transpose(0, 1).flatten(0, 1)

    return run


#: See :data:`atom_plugin.bench.cases.CASES`.
DELTA_CASES: Mapping[str, Callable[[ModelConfig, int], Iterator[Case]]] = {"gated_delta_net": gated_delta_net_cases}
