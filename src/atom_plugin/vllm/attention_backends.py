"""vLLM's side of each kind of paged cache: backend, metadata builder, cache spec, and the view of a layer's memory.

:data:`CACHES` is the table by :data:`atom_core.cache.CacheSpec`; :mod:`atom_plugin.vllm.states` has layers with states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec as VllmAttentionSpec
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from atom_core.batch import Batch, Pages
from atom_core.cache import SHUFFLED, Cache, KeyValueSpec, KVCacheView, LatentCacheView, LatentSpec
from atom_core.kernels.attention.aiter_choice import PERSISTENT_PAGES
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.mixers.base import TokenMixer
from atom_plugin.vllm.batches import BatchBuilder
from atom_plugin.vllm.cpu_kernels import PAGE_ORDER as CPU_PAGE_ORDER
from atom_plugin.vllm.cpu_kernels import view_pages


class AtomMetadataBuilder(BatchBuilder, AttentionMetadataBuilder[Batch]):
    """vLLM's batch over pages, once a step for each group of like layers."""

    def __init__(
        self, kv_cache_spec: VllmAttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.take_mixers(layer_names, vllm_config)
        if self.gives_host_lengths:
            # Drafts that are verified are decodes: a few queries each after a long context.
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        """See vLLM's AttentionMetadataBuilder; tensors are vLLM's own, which it refills in place under graphs."""
        common = common_attn_metadata
        return self.batch(common, pages=Pages(common.block_table_tensor, common.slot_mapping))


class AtomGraphMetadataBuilder(AtomMetadataBuilder):
    """For mixers whose launches do not depend on a batch's lengths: any batch may run in a captured graph."""

    _cudagraph_support = AttentionCGSupport.ALWAYS


class AtomDecodeGraphMetadataBuilder(AtomMetadataBuilder):
    """For mixers that captured graphs may replay, but only of decodes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class AtomAttentionBackend(AttentionBackend):
    """Plain pages, eager or piecewise: any strides with keys and values side by side."""

    supported_dtypes = [torch.bfloat16, torch.float16, torch.float32]  # noqa: RUF012 - vLLM's declaration
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """See vLLM."""
        return "ATOM"

    @staticmethod
    def get_impl_cls() -> type:
        """None: our layer has no vLLM impl."""
        # vLLM's `supports_pcp` and `supports_dcp`, for context parallelism, take this error for "no".
        raise NotImplementedError("atom attention layers run themselves; there is no AttentionImpl")

    @staticmethod
    def get_builder_cls() -> type[AtomMetadataBuilder]:
        """See vLLM."""
        return AtomMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Any page that vLLM offers."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Two that native backends share, for drafts beside us; kernels go by strides."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """See vLLM."""
        return True


class AtomGraphAttentionBackend(AtomAttentionBackend):
    """Plain pages, full graphs."""

    @staticmethod
    def get_builder_cls() -> type[AtomMetadataBuilder]:
        """See vLLM."""
        return AtomGraphMetadataBuilder


class AtomShuffledAttentionBackend(AtomGraphAttentionBackend):
    """Pages in the order that aiter's kernels read, of the tokens that its fastest ones have; full graphs."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Pages of 16 tokens; in FP8 those of ``pa_persistent_fwd``, where blocks are made of them (--block-size).

        Only one size is named: of several, vLLM aligns blocks to the largest.
        """
        if isinstance(kv_cache_spec, VllmAttentionSpec) and kv_cache_spec.dtype.itemsize == 1:
            return [next(size for size in (*PERSISTENT_PAGES, 16) if kv_cache_spec.block_size % size == 0)]
        return [16]


class AtomCpuAttentionBackend(AtomAttentionBackend):
    """Pages as vLLM's CPU attention arranges them: head-major, a multiple of 32 tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """See vLLM."""
        return [MultipleOf(32)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """See vLLM."""
        return (KVCacheLayout.LBHNC,)


class AtomMLABackend(AtomAttentionBackend):
    """Rows of latents, eager or piecewise."""

    @staticmethod
    def get_name() -> str:
        """See vLLM."""
        return "ATOM_MLA"

    @classmethod
    def is_mla(cls) -> bool:
        """See vLLM."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """See vLLM."""
        return False


class AtomGraphMLABackend(AtomMLABackend):
    """Rows of latents, full graphs of decodes."""

    @staticmethod
    def get_builder_cls() -> type[AtomMetadataBuilder]:
        """See vLLM."""
        return AtomDecodeGraphMetadataBuilder


def view_shuffled(kv_cache: torch.Tensor, head_dim: int) -> KVCacheView:
    """View vLLM's ``[blocks, kv heads, tokens, K | V]`` of any order as shuffled pages: of each, keys, then values.

    Only our kernels read these bytes, so their order within a block is ours to choose; they must lie together.
    """
    blocks, heads, tokens, packed = kv_cache.shape
    side = heads * tokens * head_dim
    reach = sum((size - 1) * stride for size, stride in zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True))
    assert packed == 2 * head_dim
    assert reach + 1 == 2 * side <= kv_cache.stride(0), "a block's bytes lie together, apart from other blocks'"
    sides = kv_cache.as_strided((blocks, 2, side), (kv_cache.stride(0), side, 1))
    return KVCacheView.of_shuffled(sides[:, 0], sides[:, 1], heads, tokens)


def _key_value_backend(mixer: TokenMixer, spec: KeyValueSpec) -> type[AttentionBackend]:
    if spec.order == CPU_PAGE_ORDER:
        return AtomCpuAttentionBackend
    if spec.order == SHUFFLED:
        return AtomShuffledAttentionBackend
    assert spec.order == "plain", f"no backend for pages in the order {spec.order!r}"
    return AtomGraphAttentionBackend if mixer.graph_support == "always" else AtomAttentionBackend


def _key_value_spec(spec: KeyValueSpec, cache: CacheConfig) -> KVCacheSpec:
    shape = {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_dim, **_in_bytes(spec.dtype, cache)}
    if spec.window is not None:
        return SlidingWindowSpec(**shape, sliding_window=spec.window)
    return FullAttentionSpec(**shape)


def _key_value_view(spec: KeyValueSpec, memory: torch.Tensor) -> KVCacheView:
    view = {CPU_PAGE_ORDER: view_pages, SHUFFLED: view_shuffled}.get(spec.order, KVCacheView.of_packed)
    return view(memory.view(spec.dtype), spec.head_dim)


def _latent_backend(mixer: TokenMixer, spec: LatentSpec) -> type[AttentionBackend]:
    return AtomMLABackend if mixer.graph_support == "none" else AtomGraphMLABackend


def _latent_spec(spec: LatentSpec, cache: CacheConfig) -> KVCacheSpec:
    # All ranks have all latents; vLLM 0.30 does not ask.
    whole = {"max_tp_shards": 1} if "max_tp_shards" in {it.name for it in fields(MLAAttentionSpec)} else {}
    shape = {"num_kv_heads": 1, "head_size": spec.row, "cache_dtype_str": cache.cache_dtype}
    return MLAAttentionSpec(**shape, **_in_bytes(spec.dtype, cache), **whole)


def _latent_view(spec: LatentSpec, memory: torch.Tensor) -> LatentCacheView:
    rows = memory.view(spec.dtype)
    return LatentCacheView(rows.squeeze(1) if rows.dim() == 4 else rows)  # vLLM's pages have one head


def _in_bytes(dtype: torch.dtype, cache: CacheConfig) -> dict[str, Any]:
    """What all specs say; FP8 is bytes to vLLM."""
    return {
        "block_size": cache.block_size,
        "dtype": torch.uint8 if dtype in FP8_DTYPES else dtype,
        "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
    }


@dataclass(frozen=True)
class CacheKind:
    """What vLLM is told of one kind of cache; each function is given the mixer's :attr:`TokenMixer.cache_spec`."""

    backend: Callable[[TokenMixer, Any], type[AttentionBackend]]
    spec: Callable[[Any, CacheConfig], KVCacheSpec]
    view: Callable[[Any, torch.Tensor], Cache]
    """Of the memory that vLLM binds to the layer."""


CACHES: Mapping[type, CacheKind] = {
    KeyValueSpec: CacheKind(_key_value_backend, _key_value_spec, _key_value_view),
    LatentSpec: CacheKind(_latent_backend, _latent_spec, _latent_view),
}
