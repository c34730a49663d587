"""vLLM's CPU kernels as implementations of the core's ops: C++ for the processor at hand, oneDNN for linear layers.

The gated activation is torch's: it vectorises exponentials, which vLLM's does not, and is two to eight times as fast.

vLLM's CPU attention has a page layout of its own (a head's keys, then its values, packed for the instruction set). So
the kernel that writes the cache and the one that reads it are chosen together, by one page order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform

from atom_core.batch import Batch
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.attention import PagedAttentionSpec
from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.linear import LinearKernel, LinearSpec
from atom_core.kernels.linear.widened import why_not_widened
from atom_core.kernels.moved import move_back
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope_cache import QkvCacheSpec
from atom_core.kernels.rms_norm import FLOAT32_WEIGHT, RmsNormSpec
from atom_core.kernels.rms_norm.cpu import rms_norm as rms_norm_of_torch
from atom_core.kernels.select import Implementation, Target
from atom_core.types import GraphSupport

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PAGE_ORDER: CacheOrder = "vllm-cpu"

#: How many columns of a packed weight are read back at once.
_UNITS = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def view_pages(kv_cache: torch.Tensor, head_dim: int) -> KVCacheView:
    """View vLLM's ``[blocks, kv heads, tokens, K | V]`` as its CPU kernels read it: a head's keys, then its values."""
    blocks, heads, tokens, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, 2 * tokens, head_dim).chunk(2, dim=2)
    return KVCacheView(keys, values, PAGE_ORDER)


def cpu_kernels(vllm_config: VllmConfig) -> Mapping[str, Implementation[Hashable, object]]:
    """The CPU kernels that vLLM ships, by op name."""
    block_size = vllm_config.cache_config.block_size
    tables = RopeTables()
    found = {
        "rms_norm": Implementation("framework", _norm_supports, lambda spec, target: _rms_norm),
        "linear": Implementation("framework", _linear_supports, _build_linear),
        "experts": Implementation("framework", _experts_supports, lambda spec, target: FusedExperts()),
        "qk_norm_rope_cache": Implementation(
            "framework", _qkv_supports, lambda spec, target: FillCpuCache(spec.qkv, block_size, tables)
        ),
        "attention": Implementation(
            "framework",
            partial(_attention_supports, block_size=block_size),
            lambda spec, target: CpuAttention(spec, block_size),
        ),
    }
    return cast("Mapping[str, Implementation[Hashable, object]]", found)


def _instruction_set(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """The instruction set of vLLM's cache and attention kernels: vLLM's choice, with one exception.

    With AVX-512, vLLM's 16-wide kernel prefills 16-bit dtypes a fifth faster than the 32-wide one, and decodes as fast.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    chosen = cast(str, _get_attn_isa(dtype, block_size, head_dim))
    wide = chosen == "vec" and dtype != torch.float32 and torch.cpu._is_avx512_supported()
    return "vec16" if wide else chosen


def _no_kernel_for(dtype: torch.dtype) -> str | None:
    return None if dtype in _DTYPES else f"vLLM's CPU kernels have bfloat16, float16 and float32, not {dtype}."


def _norm_supports(spec: RmsNormSpec, target: Target) -> str | None:
    return FLOAT32_WEIGHT if spec.float32_weight else _no_kernel_for(spec.dtype)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
        return x, residual
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, eps)
    return out, None


def _linear_supports(spec: LinearSpec, target: Target) -> str | None:
    if spec.shares_weight:
        return "The embedding reads this weight too; packing it would store it twice."
    if spec.float32_result:
        return "vLLM's products have results in the model's dtype, not in float32."
    if not torch.cpu._is_avx512_supported() and why_not_widened(spec.dtype, target) is None:
        return f"Without AVX-512 vLLM leaves products in {spec.dtype} to torch, which multiplies them one by one."
    return _no_kernel_for(spec.dtype)


def _build_linear(spec: LinearSpec, target: Target) -> LinearKernel:
    return BlockedLinear() if _blocks_pay(spec) else DispatchedLinear()


def _blocks_pay(spec: LinearSpec) -> bool:
    """Whether vLLM's kernel over a blocked weight, which vLLM itself uses for small weights on AMX, is faster here.

    On processors with bfloat16 dot products and without AMX, it is a fifth to a third faster than oneDNN for up to 16
    rows. For the many rows of a prefill it is 1% to 2% slower from 2,048 input features on, and 3% to 4% below; there
    only heads gain.
    """
    if spec.dtype != torch.bfloat16 or spec.in_features % 32 or spec.out_features % 32 or not _has_dot_products_alone():
        return False
    return spec.few_rows or spec.in_features >= 2048


def _has_dot_products_alone() -> bool:
    """Whether the processor has bfloat16 dot products and no AMX: blocked weights were measured there."""
    tiles = torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_avx512_bf16_supported() and not tiles and not current_platform.is_zen_cpu()


def _unblocked(blocks: torch.Tensor) -> torch.Tensor:
    """The weight that ``blocks`` hold in another order; of experts, all weights."""
    weight = blocks.clone()
    move_back(weight, torch.ops._C.convert_weight_packed)
    return weight


class BlockedLinear:
    """A linear layer over a weight in VNNI blocks; see :class:`atom_core.kernels.linear.LinearKernel`."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Store the blocks, and the bias in float32, which the kernel requires."""
        self._blocks = torch.ops._C.convert_weight_packed(weight)
        self._bias = None if bias is None else bias.float()
        return True

    def unpacked(self) -> torch.Tensor:
        """See :class:`atom_core.kernels.linear.PackingLinearKernel`."""
        return _unblocked(self._blocks)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``. A row-parallel layer passes its bias on the first rank alone."""
        bias = None if bias is None else self._bias
        return ops.weight_packed_linear_cpu(x, self._blocks, self._blocks.shape[0], bias)


class DispatchedLinear:
    """A linear layer as vLLM dispatches it on a CPU; see :class:`atom_core.kernels.linear.LinearKernel`."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Have vLLM pack the weight. True: the packed form is all that is needed."""
        layer: Any = SimpleNamespace(
            weight=torch.nn.Parameter(weight.detach(), requires_grad=False),
            bias=None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False),
        )
        self._dtype = weight.dtype
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        self._linear, self._bias = layer.cpu_linear, layer.bias
        packed = layer.weight.numel() == 0
        self._weight = None if packed else layer.weight
        self._shape = weight.shape
        return packed

    def unpacked(self) -> torch.Tensor:
        """See :class:`atom_core.kernels.linear.PackingLinearKernel`.

        vLLM cannot unpack a weight, so its columns are computed as products with unit vectors; zeros lose their signs.
        An update that brings some tensors of a layer without the others needs this.
        """
        columns = self._shape[1]
        weight = torch.empty(self._shape, dtype=self._dtype)
        for first in range(0, columns, _UNITS):
            count = min(_UNITS, columns - first)
            units = torch.zeros(count, columns, dtype=self._dtype)
            units[:, first:].fill_diagonal_(1)
            weight[:, first : first + count] = self._linear(units, self._weight, None).t()
        return weight

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``. A row-parallel layer passes its bias on the first rank alone."""
        return cast(torch.Tensor, self._linear(x, self._weight, None if bias is None else self._bias))


def _experts_supports(spec: ExpertsSpec, target: Target) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"vLLM's fused experts over blocks are used in bfloat16, not in {spec.dtype}."
    if not _has_dot_products_alone():
        return "vLLM's fused experts over blocks are used with AVX-512's bfloat16 dot products where there is no AMX."
    if spec.activation != "silu" or spec.bias:
        return "vLLM's fused experts over blocks are used with silu and without biases."
    if spec.total not in (None, spec.count):
        return f"They take all experts of a layer, not {spec.count} of {spec.total}."
    if spec.hidden_size % 32 or spec.intermediate_size % 32:
        return (
            "They take hidden and intermediate sizes that are multiples of 32, not "
            f"{spec.hidden_size} and {spec.intermediate_size}."
        )
    return None


class FusedExperts:
    """All experts of a layer in one call, over weights in blocks; see :class:`atom_core.kernels.experts.ExpertsKernel`.

    Intermediate values and the output of each routed token are rounded to bfloat16.
    """

    def adopt(self, layer: ExpertWeights) -> bool:
        """Store the blocks."""
        self._blocks = tuple(torch.ops._C.convert_weight_packed(it.detach()) for it in (layer.gate_up, layer.down))
        return True

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.experts.PackingExpertsKernel`."""
        gate_up, down = self._blocks
        return _unblocked(gate_up), _unblocked(down)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if len(x):
            without = (None, None, None, None, None)  # scales, zero points, blocks of a quantised weight
            ops.fused_experts_cpu(
                out, x.contiguous(), *self._blocks, weights, experts, ops.CPUQuantMethod.UNQUANT, *without
            )
        return out


def _qkv_supports(spec: QkvCacheSpec, target: Target) -> str | None:
    if spec.order != PAGE_ORDER:
        return f"vLLM's CPU kernel writes pages in its own order, not {spec.order!r} ones."
    return _no_kernel_for(spec.qkv.dtype)


class RopeTables:
    """Rope tables in the model's dtype, as vLLM's kernel requires: one for all layers that share a float32 table."""

    def __init__(self) -> None:
        self._tables: dict[int, torch.Tensor] = {}

    def of(self, cos_sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``cos_sin`` in ``dtype``."""
        key = cos_sin.data_ptr()
        if key not in self._tables:
            self._tables[key] = cos_sin.to(dtype)
        return self._tables[key]


class FillCpuCache:
    """q/k norm, rope and the cache write with vLLM's kernels; rope works in place in ``qkv`` where there is no norm."""

    def __init__(self, spec: QkvSpec, block_size: int, tables: RopeTables) -> None:
        self.spec = spec
        self.isa = _instruction_set(spec.dtype, block_size, spec.head_dim)
        self.tables = tables

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """See :mod:`atom_core.kernels.qk_norm_rope_cache`."""
        spec = self.spec
        dim, heads, kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
        q, k, v = qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
        if weights.q_norm is not None:
            q, k = self._norm(q, weights.q_norm, weights.eps), self._norm(k, weights.k_norm, weights.eps)
        cos_sin = self.tables.of(weights.cos_sin, spec.dtype)
        torch.ops._C.rotary_embedding(positions, q, k, dim, cos_sin, not spec.interleaved)
        ops.cpu_attn_reshape_and_cache(
            k.unflatten(1, (kv_heads, dim)),
            v.unflatten(1, (kv_heads, dim)),
            cache.key,
            cache.value,
            slots,
            self.isa,
        )
        return q.unflatten(1, (heads, dim))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, self.spec.head_dim).contiguous()  # a single head reshapes to a view with strides
        if weight is not None and weight.dtype != x.dtype:  # vLLM's kernel has both in one dtype
            return rms_norm_of_torch(rows, weight, eps, None)[0].view(x.shape)
        torch.ops._C.rms_norm(rows, rows, weight, eps)
        return rows.view(x.shape)


def _attention_supports(spec: PagedAttentionSpec, target: Target, *, block_size: int) -> str | None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if spec.head_dim not in sizes:
        return f"vLLM's CPU attention has head sizes {', '.join(map(str, sizes))}, not {spec.head_dim}."
    if block_size % 32:
        return f"vLLM's CPU attention wants pages of a multiple of 32 tokens, not {block_size} (--block-size)."
    if spec.cache_dtype != spec.dtype:
        return f"vLLM's CPU attention wants the cache in the model's dtype here, not {spec.cache_dtype}."
    return _no_kernel_for(spec.dtype)


class CpuAttention:
    """vLLM's CPU attention over its own page order; see :class:`atom_core.kernels.attention.PagedAttentionKernel`."""

    order: CacheOrder = PAGE_ORDER
    graph_support: GraphSupport = "none"

    def __init__(self, spec: PagedAttentionSpec, block_size: int) -> None:
        self.spec = spec
        self.window = -1 if spec.window is None else spec.window
        self.isa = _instruction_set(spec.dtype, block_size, spec.head_dim)

    def plan_key(self) -> Hashable:
        """Work is split by window and head counts."""
        return ("cpu", self.window, self.spec.num_heads, self.spec.num_kv_heads)

    def plan(self, batch: Batch) -> torch.Tensor:
        """vLLM's schedule of the batch over threads."""
        from vllm import envs

        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch.num_requests,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            seq_lens=batch.seq_lens,
            dtype=self.spec.dtype,
            query_start_loc=batch.query_start_loc,
            causal=batch.causal,
            sliding_window_size=self.window,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=cache.key,
            value_cache=cache.value,
            output=out,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=self.spec.scale,
            causal=batch.causal,
            alibi_slopes=None,
            sliding_window=self.window,
            block_table=batch.pages.table,
            softcap=self.spec.soft_cap or 0.0,
            scheduler_metadata=batch.plans[self.plan_key()],
            s_aux=sinks,
        )
