"""What runs a cell of the grid: our kernels, and vLLM's FlashAttention 3 and FlashMLA over the same pages.

All contenders read one pool, whose layout is vLLM's default: a page's tokens, of each the heads, of each key and value.
Each is scheduled once and called as in a layer of a captured decoding step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from atom_core.batch import Batch, Pages
from atom_core.cache import KVCacheView, LatentCacheView
from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.cache_dtypes import as_bytes, quantize
from atom_core.kernels.mla_attention import MLA_ATTENTION, MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.mixers.attention import AttentionMixer
from atom_core.mixers.base import RadixAttention
from atom_core.standalone import Step, build_runtime, plan, random_memory
from atom_plugin.bench import vllm_kernels
from atom_plugin.bench.cases import Bench, Run
from atom_plugin.bench.grid import NOPE_DIM, Cell


@dataclass(frozen=True)
class Inputs:
    """A cell's queries and pages; contenders only read them, or write what is there already."""

    cell: Cell
    bench: Bench
    q: torch.Tensor
    """``[R, H, D]``, or ``[R, H, L + R']`` over latents."""
    pools: tuple[torch.Tensor, ...]
    """Equal copies of :attr:`Cell.pool_shape`."""
    batch: Batch

    @property
    def scale(self) -> float:
        """That scores are multiplied by."""
        dim = NOPE_DIM + self.cell.rope_dim if self.cell.latent else self.cell.head_dim
        return float(dim**-0.5)

    @property
    def in_cache_dtype(self) -> torch.Tensor:
        """The queries in the cache's dtype, as libraries want them for FP8; their quantisation is not timed."""
        cache_dtype = self.cell.cache_dtype
        return self.q if cache_dtype == self.q.dtype else quantize(self.q, 1.0, cache_dtype)


def make_inputs(cell: Cell, bench: Bench, copies: int, max_model_len: int) -> Inputs:
    """Random inputs, the same for the same cell; pages lie in random order."""
    R, each, device = cell.requests, cell.pages_each, bench.device
    order = torch.randperm(R * each, generator=torch.Generator().manual_seed(0)).int().view(R, each)
    table = torch.zeros(R, -(-max_model_len // cell.page_size), dtype=torch.int32)
    table[:, :each] = order
    last = cell.tokens - 1
    slots = table[:, last // cell.page_size].long() * cell.page_size + last % cell.page_size
    generator = torch.Generator(device).manual_seed(1)
    pool = random_memory(cell.pool_shape, cell.cache_dtype, cell.dtype, device, generator)
    batch = Batch(
        query_start_loc=torch.arange(R + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((R,), cell.tokens, dtype=torch.int32, device=device),
        pages=Pages(table.to(device), slots.to(device)),
        num_requests=R,
        num_tokens=R,
        max_query_len=1,
        max_seq_len=max_model_len,
        num_decode_requests=R,
        num_decode_tokens=R,
    )
    q = bench.random(R, cell.num_heads, cell.query_dim, seed=0)
    return Inputs(cell, bench, q, (pool, *(pool.clone() for _ in range(copies - 1))), batch)


def exact(inputs: Inputs, request: int) -> torch.Tensor:
    """One request's attention in float32 over what is cached, ``[H, D]`` or ``[H, L]``, a key/value head at a time."""
    cell = inputs.cell
    pages = inputs.batch.pages.table[request, : cell.pages_each].long()
    queries = inputs.q[request].float().view(cell.num_kv_heads, -1, cell.query_dim)
    found = []
    for head in range(cell.num_kv_heads):
        pool = inputs.pools[0] if cell.latent else inputs.pools[0][:, :, head]
        rows = as_bytes(pool)[pages].view(pool.dtype).flatten(0, 1)[: cell.tokens].float()
        weights = (queries[head] @ rows[:, : cell.query_dim].T * inputs.scale).softmax(-1)
        found.append(weights @ (rows[:, : cell.head_dim] if cell.latent else rows[:, cell.head_dim :]))
    return torch.cat(found)


def ours(inputs: Inputs) -> Run:
    """The op's kernel that is chosen on this device."""
    return _OURS[inputs.cell.op](inputs)


def _kernel_cache(inputs: Inputs, pool: torch.Tensor) -> KVCacheView:
    return KVCacheView.of_packed(pool.transpose(1, 2), inputs.cell.head_dim)


def _require_plain(order: str) -> None:
    if order != "plain":
        raise vllm_kernels.Unavailable(f"it reads pages in the order {order!r}, which the grid does not write")


def _attention(inputs: Inputs) -> Run:
    cell, q = inputs.cell, inputs.q
    spec = PagedAttentionSpec(
        cell.num_heads, cell.num_kv_heads, cell.head_dim, inputs.scale, cell.dtype, cell.cache_dtype
    )
    kernel = inputs.bench.kernels.select(ATTENTION, spec)
    _require_plain(kernel.order)
    out, batch = torch.empty_like(q), inputs.batch
    if (key := kernel.plan_key()) is not None:
        batch = batch.with_plans({key: kernel.plan(batch)})
    caches = [_kernel_cache(inputs, pool) for pool in inputs.pools]

    def run(index: int) -> torch.Tensor:
        kernel(q, caches[index], batch, None, out)
        return out

    return run


def _decode_attention(inputs: Inputs) -> Run:
    """A layer's attention without norms; its rope turns by no angle, and the new keys and values are those cached."""
    cell, device = inputs.cell, inputs.bench.device
    spec = QkvSpec(cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.head_dim, False, False, cell.dtype)
    half = torch.ones(cell.tokens, cell.head_dim // 2, device=device)
    weights = QkvWeights(torch.cat((half, torch.zeros_like(half)), -1))
    runtime = build_runtime(device, cell.dtype, inputs.batch.max_seq_len, cache_dtype=cell.cache_dtype)
    runtime = replace(runtime, kernels=inputs.bench.kernels)
    mixer = AttentionMixer("bench", 0, spec, weights, None, None, runtime)
    layer = RadixAttention(mixer, runtime)
    _require_plain(mixer.kernel.order)
    rows = as_bytes(inputs.pools[0]).flatten(0, 1)[inputs.batch.pages.slots].view(cell.cache_dtype).to(cell.dtype)
    new = (inputs.q, *(side.contiguous() for side in torch.split(rows, cell.head_dim, -1)))
    qkv = torch.cat([it.flatten(1) for it in new], -1)
    positions = torch.full((cell.requests,), cell.tokens - 1, device=device)
    batch = plan(layer, inputs.batch)
    steps = [Step(batch, {0: _kernel_cache(inputs, pool)}) for pool in inputs.pools]
    return lambda index: layer((qkv,), positions, steps[index]).view(inputs.q.shape)


def _mla_attention(inputs: Inputs) -> Run:
    cell, q, batch = inputs.cell, inputs.q, inputs.batch
    shape = MlaSpec(
        cell.num_heads, cell.head_dim, NOPE_DIM, cell.rope_dim, NOPE_DIM, False, cell.dtype, cell.cache_dtype
    )
    kernel = inputs.bench.kernels.select(MLA_ATTENTION, MlaAttentionSpec(shape, inputs.scale))
    out = q.new_empty(*q.shape[:2], cell.head_dim)
    caches = [LatentCacheView(pool) for pool in inputs.pools]

    def run(index: int) -> torch.Tensor:
        kernel(q, caches[index], batch, out)
        return out

    return run


_OURS: Mapping[str, Callable[[Inputs], Run]] = {
    "decode_attention": _decode_attention,
    "attention": _attention,
    "mla_attention": _mla_attention,
}


def libraries(cell: Cell) -> dict[str, Callable[[Inputs], Run]]:
    """The contenders of vLLM by name; each raises :class:`vllm_kernels.Unavailable` if it cannot run."""
    if cell.latent:
        return {"FlashAttention 3": _flash_attention_of_latents, "FlashMLA": _flash_mla}
    return {"FlashAttention 3": _flash_attention}


def _flash_attention(inputs: Inputs) -> Run:
    cell, batch, q = inputs.cell, inputs.batch, inputs.in_cache_dtype
    out = torch.empty_like(inputs.q)
    attend = vllm_kernels.flash_attention_3(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        page_table=batch.pages.table,
        max_query_len=1,
        max_seq_len=batch.max_seq_len,
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        page_size=cell.page_size,
        dtype=cell.cache_dtype,
        longest=cell.tokens,
    )
    keys = [pool[..., : cell.head_dim] for pool in inputs.pools]
    values = [pool[..., cell.head_dim :] for pool in inputs.pools]
    return lambda index: attend(q, keys[index], values[index], out)


def _flash_attention_of_latents(inputs: Inputs) -> Run:
    cell, batch = inputs.cell, inputs.batch
    attend = vllm_kernels.flash_attention_3_of_latents(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        page_table=batch.pages.table,
        max_seq_len=batch.max_seq_len,
        num_heads=cell.num_heads,
        rank=cell.head_dim,
        rope_dim=cell.rope_dim,
        page_size=cell.page_size,
        scale=inputs.scale,
        dtype=cell.dtype,
        cache_dtype=cell.cache_dtype,
        longest=cell.tokens,
    )
    return lambda index: attend(inputs.q, inputs.pools[index])


def _flash_mla(inputs: Inputs) -> Run:
    cell, batch, q = inputs.cell, inputs.batch, inputs.in_cache_dtype
    attend = vllm_kernels.flash_mla(
        seq_lens=batch.seq_lens,
        page_table=batch.pages.table,
        num_heads=cell.num_heads,
        rank=cell.head_dim,
        scale=inputs.scale,
        page_size=cell.page_size,
        cache_dtype=cell.cache_dtype,
    )
    return lambda index: attend(q, inputs.pools[index])
