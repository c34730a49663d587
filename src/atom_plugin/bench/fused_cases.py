"""The cases of fused ops for `atom-plugin bench kernels`; see :mod:`atom_plugin.bench.cases`.

Ours run through the core's layers as in a model: one launch if the op is fused on this device, else its separate ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from atom_core.cache import KVCacheView
from atom_core.config import ModelConfig
from atom_core.fusion.linear import NormedLinear, Stream, StreamNorm
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.qk_norm_rope.reference import qk_norm_rope
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Column, MergedColumnLinear
from atom_core.layers.norm import RMSNorm
from atom_core.mixers.attention import AttentionMixer
from atom_core.mixers.base import RadixAttention
from atom_core.runtime import Runtime
from atom_core.standalone import Step, build_runtime, plan
from atom_plugin.bench.batches import step_batch
from atom_plugin.bench.cases import (
    MAX_MODEL_LEN,
    PAGE_SIZE,
    Bench,
    Case,
    Run,
    keys_and_values_of,
    qkv_spec,
    qkv_weights,
)
from atom_plugin.bench.floor import decodes

#: Rows of products, and (requests, tokens of each including the new one) of decoding attention.
NORMED_ROWS = (1, 8, 16)
DECODES = ((1, 129), (8, 513), (64, 513), (64, 2049), (256, 513))


def normed_linear_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """The norm, the gate and up product, and the activation."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    if not config.has_dense_layers:
        return
    for rows in NORMED_ROWS:
        yield Case(
            "normed_linear",
            f"gate_up {2 * intermediate} x {hidden}, {rows} {'row' if rows == 1 else 'rows'}",
            num_bytes=(2 * intermediate * hidden + hidden + rows * (hidden + intermediate)) * itemsize,
            num_operations=4 * rows * intermediate * hidden,
            contenders={
                "atom": partial(_our_normed_product, config, rows),
                "torch": partial(_torch_normed_product, config, rows),
            },
        )


def _gate_up(config: ModelConfig, rows: int, bench: Bench) -> tuple[torch.Tensor, ...]:
    hidden = config.hidden_size
    weights = bench.random(2 * config.intermediate_size, hidden, seed=2, scale=hidden**-0.5)
    return bench.random(rows, hidden, seed=0), 1.0 + bench.random(hidden, seed=1, scale=0.1), weights


def _our_normed_product(config: ModelConfig, rows: int, bench: Bench, copies: int) -> Run:
    x, norm_weight, weight = _gate_up(config, rows, bench)
    runtime = _runtime(bench)
    size = config.intermediate_size
    columns = [Column(name, size, range(size)) for name in ("gate_proj", "up_proj")]

    activation = GatedActivation(config.activation, size, runtime)

    def layer() -> NormedLinear:
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, runtime)
        norm.weight.data.copy_(norm_weight)
        linear = MergedColumnLinear(config.hidden_size, columns, False, runtime)
        linear.weight.data.copy_(weight)
        linear.finalize_weights()
        return NormedLinear(StreamNorm(norm, runtime), linear, config.activation, runtime)

    layers = [layer() for _ in range(copies)]

    def run(index: int) -> torch.Tensor:
        stream = Stream(None, x)
        y = layers[index].fused(stream)
        return activation(layers[index].product(stream)[0]) if y is None else y

    return run


def _torch_normed_product(config: ModelConfig, rows: int, bench: Bench, copies: int) -> Run:
    x, norm_weight, weight = _gate_up(config, rows, bench)
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def run(index: int) -> torch.Tensor:
        normed = F.rms_norm(x, norm_weight.shape, norm_weight, config.rms_norm_eps)
        return gated_activation(F.linear(normed, weights[index]), config.activation)

    return run


def decode_attention_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """A decoding layer's attention from raw qkv to its output, with the cache write; none for MLA."""
    mixer = keys_and_values_of(config)
    if mixer is None:
        return
    H, K, D = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    for requests, tokens in DECODES:
        yield Case(
            "decode_attention",
            f"{requests} x {tokens}, {H} + {K} heads of {D}",
            num_bytes=requests * (2 * tokens * K * D + (2 * H + 2 * K) * D) * itemsize,
            num_operations=4 * requests * tokens * H * D,
            contenders={
                "atom": partial(_our_decode, config, requests, tokens),
                "torch": partial(_torch_decode, config, requests, tokens),
            },
        )


def _runtime(bench: Bench) -> Runtime:
    return replace(build_runtime(bench.device, bench.dtype, MAX_MODEL_LEN), kernels=bench.kernels)


class _Decode:
    """Requests of ``tokens`` tokens each, the last one new: its raw qkv, and the other tokens' keys and values."""

    def __init__(self, config: ModelConfig, requests: int, tokens: int, bench: Bench) -> None:
        self.spec, self.weights = qkv_spec(config, bench), qkv_weights(config, bench)
        H, K, D = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        self.qkv = bench.random(requests, (H + 2 * K) * D, seed=0)
        self.positions = torch.full((requests,), tokens - 1, device=bench.device)
        self.batch, num_pages = step_batch(decodes(requests, tokens - 1), bench.device)
        # Full pages; rows past the requests' tokens are never read.
        self.pages_each = num_pages // requests
        shape = (requests, self.pages_each * PAGE_SIZE, K, D)
        self.keys, self.values = bench.random(*shape, seed=3), bench.random(*shape, seed=4)


def _our_decode(config: ModelConfig, requests: int, tokens: int, bench: Bench, copies: int) -> Run:
    it = _Decode(config, requests, tokens, bench)
    runtime, dim = _runtime(bench), it.spec.head_dim
    layer = RadixAttention(AttentionMixer("bench", 0, it.spec, it.weights, None, None, runtime), runtime)
    batch = plan(layer, it.batch)
    pages = torch.cat((it.keys, it.values), -1).view(-1, PAGE_SIZE, *it.keys.shape[2:-1], 2 * dim).transpose(1, 2)
    pool = torch.empty_like(pages, memory_format=torch.contiguous_format)
    pool[batch.pages.table[:, : it.pages_each].flatten().long()] = pages
    pools = [pool, *(pool.clone() for _ in range(copies - 1))]
    steps = [Step(batch, {0: KVCacheView.of_packed(each, dim)}) for each in pools]
    return lambda index: layer((it.qkv,), it.positions, steps[index])


def _torch_decode(config: ModelConfig, requests: int, tokens: int, bench: Bench, copies: int) -> Run:
    """torch's ops over contiguous keys and values, which a paged cache does not have."""
    it = _Decode(config, requests, tokens, bench)
    sides = [side[:, :tokens].transpose(1, 2).contiguous() for side in (it.keys, it.values)]
    pools = [sides, *([side.clone() for side in sides] for _ in range(copies - 1))]
    scale = it.spec.head_dim**-0.5

    def run(index: int) -> torch.Tensor:
        keys, values = pools[index]
        q, k, v = qk_norm_rope(it.qkv, it.positions, it.weights, spec=it.spec)
        keys[:, :, -1], values[:, :, -1] = k, v
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True).flatten(1)

    return run


#: See :data:`atom_plugin.bench.cases.CASES`.
FUSED_CASES: Mapping[str, Callable[[ModelConfig, int], Iterator[Case]]] = {
    "normed_linear": normed_linear_cases,
    "decode_attention": decode_attention_cases,
}
