"""The calls that `atom-plugin bench kernels` measures: each op's calls of a model, ours and other contenders'.

A case states the bytes and operations of a call, and how each contender runs it; :data:`CASES` maps each op to the
function that lists its cases. A contender makes the requested number of buffer sets, always with the same values, and
returns a function that runs the call on one of them.

`T` tokens or rows, `N` and `K` a weight's rows and columns, `H` query heads and `K` key/value heads of size `D`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from atom_core.batch import Batch, Pages
from atom_core.cache import KVCacheView
from atom_core.config import AttentionConfig, MixerConfig, MlaConfig, ModelConfig
from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.kernels.output_gate import OUTPUT_GATE, OutputGateSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope.reference import qk_norm_rope
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, QkvCacheSpec
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.kernels.select import KernelSet
from atom_core.rope import cos_sin_table
from atom_plugin.bench import vllm_kernels

#: Rows of products, tokens of small ops, and (requests, tokens each) of attention.
PRODUCT_ROWS = (1, 2, 4, 8, 16)
NORM_ROWS = (1, 8, 64, 4096)
QKV_TOKENS = (1, 8, 64, 512, 4096)
DECODES = ((1, 2048), (8, 2048), (64, 2048), (256, 512))
PREFILLS = ((8, 512), (1, 8192))

PAGE_SIZE = 16
#: Decoding graphs are captured for sequences of up to this many tokens, as in an engine.
MAX_MODEL_LEN = 4096

#: Runs the call on the buffer set of that index.
Run = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Bench:
    """The device, dtype and kernels of the cases."""

    device: torch.device
    dtype: torch.dtype
    kernels: KernelSet

    def random(self, *shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed values, the same for the same shape and seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, scale, generator=generator)


#: Makes that many buffer sets. Raises :class:`vllm_kernels.Unavailable` if the contender cannot run.
Contender = Callable[[Bench, int], Run]


@dataclass(frozen=True)
class Case:
    """One call."""

    op: str
    name: str
    num_bytes: int
    """Bytes that the call must read and write at least once."""
    num_operations: int
    contenders: Mapping[str, Contender]
    """By name; "atom" is ours. All return the same values up to rounding."""
    exact: tuple[Contender, ...] = ()
    """References in float32, if torch's contender rounds intermediate values: one for each valid rounding of inputs."""
    unrounded: Contender | None = None
    """The reference without quantised inputs: if intermediate values are quantised too, valid contenders may differ by
    as much as quantisation changes the result."""
    operand_bits: int = 16
    """Of the numbers that matrix products multiply."""


@dataclass(frozen=True)
class Product:
    """One matrix product of a model."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    few_rows: bool = False


def products(config: ModelConfig) -> list[Product]:
    """A layer's products and the head's, without those of experts."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    kinds = {type(layer.mixer): layer.mixer for layer in config.layers}
    found = [
        *(product for mixer in kinds.values() for product in _of_mixer(config, mixer)),
        Product("gate_up", 2 * intermediate, hidden, config.mlp_bias),
        Product("down", hidden, intermediate, config.mlp_bias),
        Product("head", config.vocab_size, hidden, few_rows=True),
    ]
    if not config.has_dense_layers:
        found = [product for product in found if product.name not in ("gate_up", "down")]
    return found


def routers(config: ModelConfig) -> list[Product]:
    """The MoE layers' routers, which are never quantised."""
    sizes = dict.fromkeys(layer.moe.routing.num_experts for layer in config.layers if layer.moe is not None)
    return [Product("router", size, config.hidden_size) for size in sizes]


def _of_mixer(config: ModelConfig, mixer: MixerConfig) -> list[Product]:
    if isinstance(mixer, MlaConfig):
        return _of_mla(config, mixer)
    if isinstance(mixer, AttentionConfig):
        return _of_attention(config, mixer)
    values = mixer.num_value_heads * mixer.value_dim
    return [
        Product("qkvzba", mixer.channels + values + 2 * mixer.num_value_heads, config.hidden_size),
        Product("out", config.hidden_size, values),
    ]


def _of_attention(config: ModelConfig, mixer: AttentionConfig) -> list[Product]:
    heads, kv_heads = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    return [
        Product("qkv", (1 + mixer.output_gate) * heads + 2 * kv_heads, config.hidden_size, mixer.qkv_bias),
        Product("o", config.hidden_size, heads, mixer.out_bias),
    ]


def _of_mla(config: ModelConfig, latent: MlaConfig) -> list[Product]:
    hidden, queries, rank = config.hidden_size, latent.num_heads * latent.query_dim, latent.query_rank
    found = [
        Product("q_a and latent", (rank or queries) + latent.row, hidden),
        Product("o", hidden, latent.num_heads * latent.value_dim),
    ]
    return found if rank is None else [*found, Product("q_b", queries, rank)]


def linear_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """Products of few rows, which the weight's bytes bound."""
    for product in products(config):
        N, K = product.out_features, product.in_features
        for rows in PRODUCT_ROWS:
            yield Case(
                "linear",
                f"{product.name} {N} x {K}, {rows} {'row' if rows == 1 else 'rows'}",
                num_bytes=(N * K + rows * (N + K) + (N if product.bias else 0)) * itemsize,
                num_operations=2 * rows * N * K,
                contenders={
                    "atom": partial(_our_product, product, rows),
                    "torch": partial(_torch_product, product, rows),
                },
            )


def _product_buffers(product: Product, rows: int, bench: Bench, copies: int) -> tuple[Any, ...]:
    N, K = product.out_features, product.in_features
    x = bench.random(rows, K, seed=0)
    weights = [bench.random(N, K, seed=1, scale=K**-0.5) for _ in range(copies)]
    return x, weights, bench.random(N, seed=2) if product.bias else None


def _our_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    x, weights, bias = _product_buffers(product, rows, bench, copies)
    spec = LinearSpec(product.in_features, product.out_features, product.bias, bench.dtype, few_rows=product.few_rows)
    kernels = [bench.kernels.select(LINEAR, spec) for _ in weights]
    for kernel, weight in zip(kernels, weights, strict=True):
        kernel.adopt(weight, bias)
    return lambda index: kernels[index](x, weights[index], bias)


def _torch_product(product: Product, rows: int, bench: Bench, copies: int) -> Run:
    x, weights, bias = _product_buffers(product, rows, bench, copies)
    return lambda index: F.linear(x, weights[index], bias)


def rms_norm_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """The norm with its residual, both read and written."""
    N = config.hidden_size
    for rows in NORM_ROWS:
        yield Case(
            "rms_norm",
            f"{rows} x {N} with residual",
            num_bytes=(4 * rows * N + N) * itemsize,
            num_operations=0,
            contenders={
                "atom": partial(_our_norm, rows, N),
                "torch": partial(_torch_norm, rows, N),
                "vllm": partial(_vllm_norm, rows, N),
            },
        )


def _norm_buffers(rows: int, N: int, bench: Bench, copies: int) -> tuple[Any, ...]:
    weight = 1.0 + bench.random(N, seed=0, scale=0.1)
    inputs = [bench.random(rows, N, seed=1) for _ in range(copies)]
    return weight, inputs, [bench.random(rows, N, seed=2) for _ in range(copies)]


def _our_norm(rows: int, N: int, bench: Bench, copies: int) -> Run:
    weight, inputs, residuals = _norm_buffers(rows, N, bench, copies)
    kernel = bench.kernels.select(RMS_NORM, RmsNormSpec(N, bench.dtype))
    return lambda index: kernel(inputs[index], weight, 1e-6, residuals[index])[0]


def _torch_norm(rows: int, N: int, bench: Bench, copies: int) -> Run:
    weight, inputs, residuals = _norm_buffers(rows, N, bench, copies)
    return lambda index: F.rms_norm(residuals[index].add_(inputs[index]), (N,), weight, 1e-6)


def _vllm_norm(rows: int, N: int, bench: Bench, copies: int) -> Run:
    norm = vllm_kernels.add_and_rms_norm()
    weight, inputs, residuals = _norm_buffers(rows, N, bench, copies)
    return lambda index: norm(inputs[index], residuals[index], weight, 1e-6)


def gated_activation_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """SiLU-and-multiply, or the model's other activation."""
    N = config.intermediate_size
    for rows in NORM_ROWS:
        contenders: dict[str, Contender] = {"atom": partial(_our_activation, config, rows)}
        if config.activation == "silu":
            contenders["torch"] = partial(_torch_activation, rows, N)
            contenders["vllm"] = partial(_vllm_activation, rows, N)
        yield Case("gated_activation", f"{rows} x {N}", 3 * rows * N * itemsize, 0, contenders)


def _our_activation(config: ModelConfig, rows: int, bench: Bench, copies: int) -> Run:
    N = config.intermediate_size
    inputs = [bench.random(rows, 2 * N, seed=0) for _ in range(copies)]
    kernel = bench.kernels.select(GATED_ACTIVATION, GatedActivationSpec(config.activation, N, bench.dtype))
    return lambda index: kernel(inputs[index])


def _torch_activation(rows: int, N: int, bench: Bench, copies: int) -> Run:
    inputs = [bench.random(rows, 2 * N, seed=0) for _ in range(copies)]
    return lambda index: F.silu(inputs[index][:, :N]) * inputs[index][:, N:]


def _vllm_activation(rows: int, N: int, bench: Bench, copies: int) -> Run:
    activate = vllm_kernels.silu_and_mul()
    inputs = [bench.random(rows, 2 * N, seed=0) for _ in range(copies)]
    return lambda index: activate(inputs[index])


def output_gate_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """The gate behind attention; none for models without."""
    mixer = keys_and_values_of(config)
    if mixer is None or not mixer.output_gate:
        return
    N = mixer.num_heads * mixer.head_dim
    for rows in NORM_ROWS:
        contenders: dict[str, Contender] = {
            "atom": partial(_our_gate, mixer, rows),
            "torch": partial(_torch_gate, mixer, rows),
        }
        yield Case("output_gate", f"{rows} x {N}", 3 * rows * N * itemsize, 0, contenders)


def _gate_buffers(
    mixer: AttentionConfig, rows: int, bench: Bench, copies: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What attention has written, and gates beside a row's queries, keys and values."""
    heads, width = mixer.num_heads * mixer.head_dim, 2 * (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
    outs = [bench.random(rows, mixer.num_heads, mixer.head_dim, seed=0) for _ in range(copies)]
    return outs, [bench.random(rows, width, seed=1)[:, width - heads :] for _ in range(copies)]


def _our_gate(mixer: AttentionConfig, rows: int, bench: Bench, copies: int) -> Run:
    outs, gates = _gate_buffers(mixer, rows, bench, copies)
    kernel = bench.kernels.select(OUTPUT_GATE, OutputGateSpec(mixer.num_heads * mixer.head_dim))

    def run(index: int) -> torch.Tensor:
        kernel(outs[index], gates[index])
        return outs[index]

    return run


def _torch_gate(mixer: AttentionConfig, rows: int, bench: Bench, copies: int) -> Run:
    outs, gates = _gate_buffers(mixer, rows, bench, copies)
    return lambda index: outs[index].mul_(gates[index].sigmoid().view_as(outs[index]))


def qk_norm_rope_cache_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """From raw qkv to queries and a written cache; none for MLA."""
    mixer = keys_and_values_of(config)
    if mixer is None:
        return
    width = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
    for tokens in QKV_TOKENS:
        yield Case(
            "qk_norm_rope_cache",
            f"{tokens} tokens, {mixer.num_heads} + {mixer.num_kv_heads} heads of {mixer.head_dim}",
            num_bytes=tokens * (2 * width * itemsize + 4 * config.rope.rotary_dim),
            num_operations=0,
            contenders={
                "atom": partial(_our_qkv, config, tokens),
                "torch": partial(_torch_qkv, config, tokens),
                "vllm": partial(_vllm_qkv, config, tokens),
            },
        )


def attention_of(config: ModelConfig) -> AttentionConfig:
    """The attention of a model's first layer that has keys and values."""
    mixer = keys_and_values_of(config)
    assert mixer is not None
    return mixer


def keys_and_values_of(config: ModelConfig) -> AttentionConfig | None:
    """As :func:`attention_of`; None: no layer has any."""
    return next((it.mixer for it in config.layers if isinstance(it.mixer, AttentionConfig)), None)


def qkv_spec(config: ModelConfig, bench: Bench) -> QkvSpec:
    """The spec of a layer's qkv."""
    mixer = attention_of(config)
    return QkvSpec(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rotary_dim=config.rope.rotary_dim,
        interleaved=config.rope.interleaved,
        qk_norm=mixer.qk_norm,
        dtype=bench.dtype,
    )


def qkv_weights(config: ModelConfig, bench: Bench) -> QkvWeights:
    """The model's rope table, and random weights of q and k norms if it has them."""
    weights = QkvWeights(cos_sin_table(config.rope, MAX_MODEL_LEN, bench.device))
    mixer = attention_of(config)
    if mixer.qk_norm:
        norms = [1.0 + bench.random(mixer.head_dim, seed=seed, scale=0.1) for seed in (1, 2)]
        weights = replace(weights, q_norm=norms[0], k_norm=norms[1], eps=config.rms_norm_eps)
    return weights


@dataclass(frozen=True)
class _Qkv:
    """The op's inputs without the cache, which each contender makes in its own layout."""

    spec: QkvSpec
    qkv: list[torch.Tensor]
    positions: torch.Tensor
    weights: QkvWeights
    slots: torch.Tensor
    num_pages: int

    @classmethod
    def of(cls, config: ModelConfig, tokens: int, bench: Bench, copies: int) -> _Qkv:
        mixer = attention_of(config)
        width = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
        num_pages = tokens // PAGE_SIZE + 1
        generator = torch.Generator().manual_seed(0)
        slots = torch.randperm(num_pages * PAGE_SIZE, generator=generator)[:tokens]
        return cls(
            qkv_spec(config, bench),
            [bench.random(tokens, width, seed=0) for _ in range(copies)],
            torch.arange(tokens, device=bench.device) % MAX_MODEL_LEN,
            qkv_weights(config, bench),
            slots.to(bench.device),
            num_pages,
        )

    def pools(self, bench: Bench) -> list[KVCacheView]:
        spec = self.spec
        shape = (self.num_pages, spec.num_kv_heads, PAGE_SIZE, 2 * spec.head_dim)
        empty = (torch.zeros(shape, dtype=bench.dtype, device=bench.device) for _ in self.qkv)
        return [KVCacheView.of_packed(pool, spec.head_dim) for pool in empty]


def _our_qkv(config: ModelConfig, tokens: int, bench: Bench, copies: int) -> Run:
    it = _Qkv.of(config, tokens, bench, copies)
    pools = it.pools(bench)
    kernel = bench.kernels.select(QK_NORM_ROPE_CACHE, QkvCacheSpec(it.spec, bench.dtype, "plain"))
    return lambda index: kernel(it.qkv[index], it.positions, it.weights, pools[index], it.slots)


def _torch_qkv(config: ModelConfig, tokens: int, bench: Bench, copies: int) -> Run:
    it = _Qkv.of(config, tokens, bench, copies)
    pools = it.pools(bench)
    page, offset = it.slots // PAGE_SIZE, it.slots % PAGE_SIZE

    def run(index: int) -> torch.Tensor:
        q, k, v = qk_norm_rope(it.qkv[index], it.positions, it.weights, spec=it.spec)
        pools[index].key[page, :, offset] = k
        pools[index].value[page, :, offset] = v
        return q

    return run


def _vllm_qkv(config: ModelConfig, tokens: int, bench: Bench, copies: int) -> Run:
    launch = vllm_kernels.qk_norm_rope_cache()
    it = _Qkv.of(config, tokens, bench, copies)
    shape = (2, it.num_pages, PAGE_SIZE, it.spec.num_kv_heads, it.spec.head_dim)
    pools = [torch.zeros(shape, dtype=bench.dtype, device=bench.device) for _ in range(copies)]
    # vLLM keeps the table in the model's dtype.
    weights = replace(it.weights, cos_sin=it.weights.cos_sin.to(bench.dtype))
    # Without norms it rotates qkv in place, again in each call; magnitudes stay the same.
    return lambda index: launch(it.qkv[index], it.positions, weights, pools[index], it.slots, it.spec)


def attention_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """Decoding over long contexts, and prefill of whole prompts; none for MLA."""
    mixer = keys_and_values_of(config)
    if mixer is None:
        return
    H, K, D = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    for phase, batches in (("decode", DECODES), ("prefill", PREFILLS)):
        for requests, tokens in batches:
            queries = 1 if phase == "decode" else tokens
            query_keys = tokens if phase == "decode" else tokens * (tokens + 1) // 2
            layer = _Attention(requests, tokens, queries, H, K, D)
            yield Case(
                "attention",
                f"{phase} {requests} x {tokens}, {H} + {K} heads of {D}",
                num_bytes=requests * (2 * tokens * K * D + 2 * queries * H * D) * itemsize,
                num_operations=4 * requests * query_keys * H * D,
                contenders={
                    "atom": partial(_our_attention, layer),
                    "torch": partial(_torch_attention, layer),
                    "FlashAttention 3": partial(_flash_attention, layer),
                },
            )


@dataclass(frozen=True)
class _Attention:
    """Equal requests of ``tokens`` tokens each, the last ``queries`` of which are queries."""

    requests: int
    tokens: int
    queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def max_seq_len(self) -> int:
        """A decoding graph's maximum length, or the prefill's length."""
        return max(MAX_MODEL_LEN, self.tokens) if self.queries == 1 else self.tokens

    def queries_of(self, bench: Bench) -> torch.Tensor:
        """``[R * queries, H, D]``."""
        return bench.random(self.requests * self.queries, self.num_heads, self.head_dim, seed=0)

    def keys_of(self, bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
        """Two ``[R, tokens, K, D]``."""
        shape = (self.requests, self.tokens, self.num_kv_heads, self.head_dim)
        return bench.random(*shape, seed=1), bench.random(*shape, seed=2)

    def pages_of(self, bench: Bench) -> torch.Tensor:
        """int32 ``[R, pages]``, shuffled."""
        pages_each = self.tokens // PAGE_SIZE
        order = torch.randperm(self.requests * pages_each, generator=torch.Generator().manual_seed(0))
        return order.view(self.requests, pages_each).to(bench.device, torch.int32)

    def starts_of(self, bench: Bench) -> torch.Tensor:
        """int32 ``[R + 1]``."""
        return torch.arange(self.requests + 1, dtype=torch.int32, device=bench.device) * self.queries

    def lengths_of(self, bench: Bench) -> torch.Tensor:
        """int32 ``[R]``."""
        return torch.full((self.requests,), self.tokens, dtype=torch.int32, device=bench.device)


def _in_pages(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``[R, tokens, K, D]`` as ``[pages, page size, K, D]``."""
    pages = rows.reshape(-1, PAGE_SIZE, *rows.shape[2:])
    result = torch.empty_like(pages)
    result[table.flatten().long()] = pages
    return result


def _our_attention(layer: _Attention, bench: Bench, copies: int) -> Run:
    spec = PagedAttentionSpec(
        layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, bench.dtype, bench.dtype
    )
    kernel = bench.kernels.select(ATTENTION, spec)
    if kernel.order != "plain":
        raise vllm_kernels.Unavailable(
            f"it reads pages in the order {kernel.order!r}, which this benchmark does not write"
        )
    table = layer.pages_of(bench)
    q = layer.queries_of(bench)
    out = torch.empty_like(q)
    k, v = layer.keys_of(bench)
    packed = torch.cat((_in_pages(k, table), _in_pages(v, table)), -1).transpose(1, 2).contiguous()
    del k, v
    pools = [packed, *(packed.clone() for _ in range(copies - 1))]
    caches = [KVCacheView.of_packed(pool, layer.head_dim) for pool in pools]
    decoding = layer.requests if layer.queries == 1 else 0
    batch = Batch(
        query_start_loc=layer.starts_of(bench),
        seq_lens=layer.lengths_of(bench),
        pages=Pages(table, torch.full((len(q),), -1, device=bench.device)),
        num_requests=layer.requests,
        num_tokens=len(q),
        max_query_len=layer.queries,
        max_seq_len=layer.max_seq_len,
        num_decode_requests=decoding,
        num_decode_tokens=decoding,
    )
    if (key := kernel.plan_key()) is not None:
        batch = batch.with_plans({key: kernel.plan(batch)})

    def run(index: int) -> torch.Tensor:
        kernel(q, caches[index], batch, None, out)
        return out

    return run


def _torch_attention(layer: _Attention, bench: Bench, copies: int) -> Run:
    """torch's attention over contiguous keys and values, which a paged cache does not have."""
    q = torch.unflatten(layer.queries_of(bench), 0, (layer.requests, layer.queries)).transpose(1, 2).contiguous()
    keys, values = (side.transpose(1, 2).contiguous() for side in layer.keys_of(bench))
    pools = [(keys, values), *((keys.clone(), values.clone()) for _ in range(copies - 1))]
    causal = layer.queries > 1

    def run(index: int) -> torch.Tensor:
        k, v = pools[index]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _flash_attention(layer: _Attention, bench: Bench, copies: int) -> Run:
    table, starts, lengths = layer.pages_of(bench), layer.starts_of(bench), layer.lengths_of(bench)
    q = layer.queries_of(bench)
    out = torch.empty_like(q)
    k, v = (_in_pages(side, table) for side in layer.keys_of(bench))
    pools = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    attend = vllm_kernels.flash_attention_3(
        query_start_loc=starts,
        seq_lens=lengths,
        page_table=table,
        max_query_len=layer.queries,
        max_seq_len=layer.max_seq_len,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        page_size=PAGE_SIZE,
        dtype=bench.dtype,
    )
    return lambda index: attend(q, *pools[index], out)


#: The cases of a model by op: a function of its configuration and of the bytes per element.
CASES: Mapping[str, Callable[[ModelConfig, int], Iterator[Case]]] = {
    "linear": linear_cases,
    "rms_norm": rms_norm_cases,
    "gated_activation": gated_activation_cases,
    "output_gate": output_gate_cases,
    "qk_norm_rope_cache": qk_norm_rope_cache_cases,
    "attention": attention_cases,
}
