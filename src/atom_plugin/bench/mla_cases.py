"""The cases of multi-head latent attention (MLA): decoding over long contexts, and prefill of whole prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from atom_core.batch import Batch, HostLengths, Pages
from atom_core.cache import LatentCacheView
from atom_core.config import MlaConfig, ModelConfig
from atom_core.kernels.head_linear import HEAD_LINEAR, HeadLinearSpec
from atom_core.kernels.mla_attention import MLA_ATTENTION, MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaSpec
from atom_core.kernels.mla_prefill import MLA_PREFILL
from atom_core.kernels.mla_prefill.plan import plan_prefill
from atom_plugin.bench import vllm_kernels
from atom_plugin.bench.cases import MAX_MODEL_LEN, PREFILLS, Bench, Case, Run

#: FlashMLA's page size.
PAGE_SIZE = 64
#: (requests, tokens each).
DECODES = ((1, 2048), (8, 2048), (64, 2048), (64, 4096), (256, 512))
#: Tokens of the products by head.
PRODUCT_TOKENS = (1, 8, 64, 256)


@dataclass(frozen=True)
class _Batch:
    """Equal requests of ``tokens`` tokens each, the last ``queries`` of which are queries."""

    latent: MlaConfig
    requests: int
    tokens: int
    queries: int

    def spec(self, bench: Bench) -> MlaAttentionSpec:
        it = self.latent
        shape = MlaSpec(it.num_heads, it.rank, it.nope_dim, it.rope_dim, it.value_dim, True, bench.dtype, bench.dtype)
        return MlaAttentionSpec(shape, it.scale)

    def rows(self, bench: Bench) -> torch.Tensor:
        """``[R, tokens, L + R]``."""
        return bench.random(self.requests, self.tokens, self.latent.row, seed=1)

    def table(self, bench: Bench) -> torch.Tensor:
        """int32 ``[R, pages]``, shuffled."""
        each = self.tokens // PAGE_SIZE
        order = torch.randperm(self.requests * each, generator=torch.Generator().manual_seed(0))
        return order.view(self.requests, each).to(bench.device, torch.int32)

    def caches(self, bench: Bench, copies: int) -> list[LatentCacheView]:
        pages = self.rows(bench).view(-1, PAGE_SIZE, self.latent.row)
        pool = torch.empty_like(pages)
        pool[self.table(bench).flatten().long()] = pages
        return [LatentCacheView(it) for it in (pool, *(pool.clone() for _ in range(copies - 1)))]

    def batch(self, bench: Bench) -> Batch:
        starts, lengths = [0, *accumulate([self.queries] * self.requests)], [self.tokens] * self.requests
        decoding = self.requests if self.queries == 1 else 0
        return Batch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=bench.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=bench.device),
            pages=Pages(self.table(bench), torch.full((starts[-1],), -1, device=bench.device)),
            num_requests=self.requests,
            num_tokens=starts[-1],
            max_query_len=self.queries,
            max_seq_len=max(MAX_MODEL_LEN, self.tokens) if decoding else self.tokens,
            num_decode_requests=decoding,
            num_decode_tokens=decoding,
            host=HostLengths(starts, lengths),
        )


def mla_attention_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """Decoding requests; none for other kinds of attention."""
    if not isinstance(latent := config.layers[0].mixer, MlaConfig):
        return
    for requests, tokens in DECODES:
        inputs = _Batch(latent, requests, tokens, 1)
        yield Case(
            "mla_attention",
            f"decode {requests} x {tokens}, {latent.num_heads} heads",
            num_bytes=requests * (tokens * latent.row + latent.num_heads * (latent.row + latent.rank)) * itemsize,
            num_operations=2 * requests * tokens * latent.num_heads * (latent.row + latent.rank),
            contenders={
                "atom": partial(_absorbed, inputs),
                "torch": partial(_torch_absorbed, inputs),
                "FlashAttention 3": partial(_flash_attention, inputs),
                "FlashMLA": partial(_flash_mla, inputs),
            },
            exact=(partial(_torch_absorbed, inputs, exact=True),),
        )


def _absorbed(inputs: _Batch, bench: Bench, copies: int) -> Run:
    kernel = bench.kernels.select(MLA_ATTENTION, inputs.spec(bench))
    q = bench.random(inputs.requests, inputs.latent.num_heads, inputs.latent.row, seed=0)
    out = q.new_empty(inputs.requests, inputs.latent.num_heads, inputs.latent.rank)
    caches, batch = inputs.caches(bench, copies), inputs.batch(bench)

    def run(index: int) -> torch.Tensor:
        kernel(q, caches[index], batch, out)
        return out

    return run


def _torch_absorbed(inputs: _Batch, bench: Bench, copies: int, exact: bool = False) -> Run:
    """In the model's dtype, to which torch rounds the scores too, or in float32 (``exact``)."""
    q = bench.random(inputs.requests, inputs.latent.num_heads, inputs.latent.row, seed=0)
    rows = inputs.rows(bench)
    if exact:
        q, rows = q.float(), rows.float()
    sets = [rows, *(rows.clone() for _ in range(copies - 1))]

    def run(index: int) -> torch.Tensor:
        keys = sets[index]
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * inputs.latent.scale
        return torch.bmm(scores.softmax(-1).to(q.dtype), keys[..., : inputs.latent.rank])

    return run


def _flash_attention(inputs: _Batch, bench: Bench, copies: int) -> Run:
    batch, latent = inputs.batch(bench), inputs.latent
    attend = vllm_kernels.flash_attention_3_of_latents(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        page_table=batch.pages.table,
        max_seq_len=batch.max_seq_len,
        num_heads=inputs.latent.num_heads,
        rank=latent.rank,
        rope_dim=latent.rope_dim,
        page_size=PAGE_SIZE,
        scale=latent.scale,
        dtype=bench.dtype,
    )
    q = bench.random(inputs.requests, inputs.latent.num_heads, latent.row, seed=0)
    caches = inputs.caches(bench, copies)
    return lambda index: attend(q, caches[index].rows)


def _flash_mla(inputs: _Batch, bench: Bench, copies: int) -> Run:
    batch = inputs.batch(bench)
    attend = vllm_kernels.flash_mla(
        seq_lens=batch.seq_lens,
        page_table=batch.pages.table,
        num_heads=inputs.latent.num_heads,
        rank=inputs.latent.rank,
        scale=inputs.latent.scale,
    )
    q = bench.random(inputs.requests, inputs.latent.num_heads, inputs.latent.row, seed=0)
    caches = inputs.caches(bench, copies)
    return lambda index: attend(q, caches[index].rows)


def mla_prefill_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """Prefill of whole prompts with expanded latents; none for other kinds of attention."""
    if not isinstance(latent := config.layers[0].mixer, MlaConfig):
        return
    H, L = latent.num_heads, latent.rank
    widths = latent.query_dim + latent.value_dim
    for requests, tokens in PREFILLS:
        inputs = _Batch(latent, requests, tokens, tokens)
        each = latent.nope_dim + latent.value_dim
        query_keys = tokens * (tokens + 1) // 2
        yield Case(
            "mla_prefill",
            f"prefill {requests} x {tokens}, {H} heads",
            num_bytes=(requests * tokens * (latent.row + H * widths) + H * each * L) * itemsize,
            num_operations=2 * requests * H * (query_keys * widths + tokens * L * each),
            contenders={"atom": partial(_expanded, inputs), "torch": partial(_torch_expanded, inputs)},
        )


def _expanded(inputs: _Batch, bench: Bench, copies: int) -> Run:
    spec = inputs.spec(bench)
    kernel = bench.kernels.select(MLA_PREFILL, spec)
    q, expand = _prompt(inputs, bench)
    out = q.new_empty(*q.shape[:2], inputs.latent.value_dim)
    caches, batch = inputs.caches(bench, copies), inputs.batch(bench)
    plan = plan_prefill(batch, spec.latent)
    assert plan is not None

    def run(index: int) -> torch.Tensor:
        kernel(q, expand, caches[index], batch, plan, out)
        return out

    return run


def _prompt(inputs: _Batch, bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[T, H, N + R]``, and the weight that expands latents."""
    it = inputs.latent
    q = bench.random(inputs.requests * inputs.queries, inputs.latent.num_heads, it.query_dim, seed=0)
    expand = bench.random(inputs.latent.num_heads, it.nope_dim + it.value_dim, it.rank, seed=2, scale=it.rank**-0.5)
    return q, expand


def _torch_expanded(inputs: _Batch, bench: Bench, copies: int) -> Run:
    it, heads = inputs.latent, inputs.latent.num_heads
    q, expand = _prompt(inputs, bench)
    queries = q.view(inputs.requests, inputs.queries, heads, -1).transpose(1, 2)
    rows = inputs.rows(bench)
    sets = [rows, *(rows.clone() for _ in range(copies - 1))]

    def run(index: int) -> torch.Tensor:
        latents, turned = torch.split(sets[index], [it.rank, it.rope_dim], -1)
        expanded = F.linear(latents, expand.flatten(0, 1)).view(*latents.shape[:2], heads, -1).transpose(1, 2)
        plain, values = torch.split(expanded, [it.nope_dim, it.value_dim], -1)
        keys = torch.cat((plain, turned[:, None].expand(-1, heads, -1, -1)), -1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=it.scale)
        return attended.transpose(1, 2).flatten(0, 1)

    return run


def head_linear_cases(config: ModelConfig, itemsize: int) -> Iterator[Case]:
    """The projections by head: of queries into the latent space (absorbed), and of its outputs to values."""
    if not isinstance(latent := config.layers[0].mixer, MlaConfig):
        return
    H = latent.num_heads
    for K, N, carried in ((latent.nope_dim, latent.rank, latent.rope_dim), (latent.rank, latent.value_dim, 0)):
        for tokens in PRODUCT_TOKENS:
            yield Case(
                "head_linear",
                f"{tokens} tokens, {H} heads of {K} to {N}",
                num_bytes=(H * K * N + tokens * H * (K + N + 2 * carried)) * itemsize,
                num_operations=2 * tokens * H * K * N,
                contenders={
                    "atom": partial(_head_linear, (tokens, H, K, N, carried), True),
                    "torch": partial(_head_linear, (tokens, H, K, N, carried), False),
                },
            )


def _head_linear(shape: tuple[int, int, int, int, int], ours: bool, bench: Bench, copies: int) -> Run:
    tokens, heads, K, N, carried = shape
    x = bench.random(tokens, heads, K + carried, seed=0)
    weights = [bench.random(heads, K, N, seed=1, scale=K**-0.5) for _ in range(copies)]
    out = x.new_empty(tokens, heads, N + carried)
    spec = HeadLinearSpec(heads, K, N, bench.dtype)
    (*_, reference) = HEAD_LINEAR.implementations
    kernel = bench.kernels.select(HEAD_LINEAR, spec) if ours else reference.build(spec, bench.kernels.target)

    def run(index: int) -> torch.Tensor:
        kernel(x, weights[index], out)
        return out

    return run


#: See :data:`atom_plugin.bench.cases.CASES`.
MLA_CASES: Mapping[str, Callable[[ModelConfig, int], Iterator[Case]]] = {
    "mla_attention": mla_attention_cases,
    "mla_prefill": mla_prefill_cases,
    "head_linear": head_linear_cases,
}
