"""The core's PagedAttention as a vLLM attention layer: own layer, backend, batch builder and custom op.

The op ``atom::attention`` takes raw qkv; q/k norm, rope, the cache write and attention happen inside it, where the
layer's cache is known. It is on the list of ops that piecewise graphs split on, and finds its layer by name in vLLM's
forward context, as vLLM's own attention op does.

No ``from __future__ import annotations`` here: an op's schema is read from its real annotations.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.library import Library
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention as VllmAttention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec as VllmAttentionSpec
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from atom_core.attention.base import AttentionSpec, BaseAttention, PagedAttention
from atom_core.batch import Batch, HostLengths, Pages
from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels.attention import PagedAttentionKernel
from atom_core.kernels.attention.aiter_choice import PERSISTENT_PAGES
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.qk_norm_rope import QK_NORM_ROPE, QkvWeights
from atom_core.runtime import Runtime
from atom_plugin.vllm.cpu_kernels import PAGE_ORDER as CPU_PAGE_ORDER
from atom_plugin.vllm.cpu_kernels import view_pages

OP_NAME = "atom::attention"


def is_compiled(vllm_config: VllmConfig) -> bool:
    """Whether our models go through torch.compile.

    On a CPU they do not: their kernels are fused already, and tracing alone takes longer than the rest of the start.
    Nor do they where graphs break (:mod:`atom_plugin.vllm.graphs`).
    """
    from vllm import envs
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return False
    return vllm_config.compilation_config.mode != CompilationMode.NONE


class AtomMetadataBuilder(AttentionMetadataBuilder[Batch]):
    """vLLM's batch description in the core's form, once a step for each group of like layers."""

    def __init__(
        self,
        kv_cache_spec: VllmAttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        planners = (layers[name].planner for name in layer_names)
        self.planners = {key: planner for planner in planners if (key := planner.plan_key()) is not None}

    @property
    def decode_threshold(self) -> int:
        """How many tokens a request that decodes may bring."""
        return self.reorder_batch_threshold or 1

    def host_lengths(self, common: CommonAttentionMetadata) -> HostLengths | None:
        """What the host knows of the batch, where plans are made by it."""
        return None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        """See vLLM's AttentionMetadataBuilder; tensors are vLLM's own, which it refills in place under graphs."""
        common = common_attn_metadata
        decodes, _, decode_tokens, _ = split_decodes_and_prefills(common, self.decode_threshold)
        batch = Batch(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            pages=Pages(common.block_table_tensor, common.slot_mapping),
            num_requests=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_decode_requests=decodes,
            num_decode_tokens=decode_tokens,
            host=self.host_lengths(common),
        )
        if self.planners:
            plans = {key: planner.plan(batch) for key, planner in self.planners.items()}
            batch = batch.with_plans(plans)
        return batch


class AtomGraphMetadataBuilder(AtomMetadataBuilder):
    """For kernels whose launches do not depend on a batch's lengths: any batch may run in a captured graph."""

    _cudagraph_support = AttentionCGSupport.ALWAYS


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
        """Never used: our layer has no vLLM impl."""
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

        One size alone is named: blocks are kept as far apart as the largest of several asks for.
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


def _backend(kernel: PagedAttentionKernel) -> type[AtomAttentionBackend]:
    if kernel.order == CPU_PAGE_ORDER:
        return AtomCpuAttentionBackend
    if kernel.order == SHUFFLED:
        return AtomShuffledAttentionBackend
    assert kernel.order == "plain", f"no backend for pages in the order {kernel.order!r}"
    return AtomGraphAttentionBackend if kernel.graph_support == "always" else AtomAttentionBackend


def view_shuffled(kv_cache: torch.Tensor, head_dim: int) -> KVCacheView:
    """View vLLM's ``[blocks, kv heads, tokens, K | V]`` of any order as shuffled pages: of each, keys, then values.

    What a block's bytes mean is nobody's business but ours, as long as they lie together.
    """
    blocks, heads, tokens, packed = kv_cache.shape
    side = heads * tokens * head_dim
    reach = sum((size - 1) * stride for size, stride in zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True))
    assert packed == 2 * head_dim
    assert reach + 1 == 2 * side <= kv_cache.stride(0), "a block's bytes lie together, apart from other blocks'"
    sides = kv_cache.as_strided((blocks, 2, side), (kv_cache.stride(0), side, 1))
    return KVCacheView.of_shuffled(sides[:, 0], sides[:, 1], heads, tokens)


def announce(layer: AttentionLayerBase, name: str, op: str, vllm_config: VllmConfig) -> tuple[LayerNameType, bool]:
    """Have vLLM know a layer of ours, and split its graphs on the op that it calls.

    Returns:
        The name as the op is given it, and whether the op is to be called: a compiler must see it.

    Raises:
        ValueError: another layer has the name.
    """
    compilation = vllm_config.compilation_config
    if name in compilation.static_forward_context:
        raise ValueError(f"Two attention layers are named {name!r}.")
    compilation.static_forward_context[name] = layer
    # An empty list means that the user wants no splitting; None is filled with defaults before models are built.
    if compilation.splitting_ops and op not in compilation.splitting_ops:
        compilation.splitting_ops.append(op)
    return _encode_layer_name(name), is_compiled(vllm_config)


def metadata_of(layer_name: str) -> Batch | None:
    """This step's batch for a layer; None in a run without a batch."""
    batch = get_forward_context().attn_metadata
    if isinstance(batch, list):
        # Model runner V1 (goes with vLLM 0.32's support): one entry a micro-batch, and ours is never split.
        batch = batch[0]
    return batch.get(layer_name) if isinstance(batch, Mapping) else None


class VllmPagedAttention(PagedAttention, AttentionLayerBase):
    """An attention layer of ours in vLLM's eyes."""

    def __init__(self, spec: AttentionSpec, weights: QkvWeights, sinks: torch.Tensor | None, runtime: Runtime) -> None:
        super().__init__(spec, weights, sinks, runtime)
        self.layer_name = spec.name
        self.num_heads = spec.qkv.num_heads  # vLLM groups layers by it
        self.cache_dtype = runtime.cache_dtype
        self.kv_cache = torch.tensor([])
        self._view: tuple[torch.Tensor, KVCacheView] | None = None
        self._encoded_name, self._through_op = announce(self, spec.name, OP_NAME, get_current_vllm_config())

    @property
    def planner(self) -> PagedAttentionKernel:
        """What plans a step for all layers like this one."""
        return self.kernel

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See vLLM."""
        return _backend(self.kernel)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """See vLLM; asked after the block size is final. What is FP8 is bytes to vLLM."""
        cache = vllm_config.cache_config
        shape = {
            "block_size": cache.block_size,
            "num_kv_heads": self.spec.qkv.num_kv_heads,
            "head_size": self.spec.qkv.head_dim,
            "dtype": torch.uint8 if self.cache_dtype in FP8_DTYPES else self.cache_dtype,
            "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
        }
        if self.spec.window is not None:
            return SlidingWindowSpec(**shape, sliding_window=self.spec.window)
        return FullAttentionSpec(**shape)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See vLLM; the model finalizes all its weights itself."""

    def batch(self) -> Batch | None:
        """See :class:`PagedAttention`."""
        return metadata_of(self.layer_name)

    def cache(self) -> KVCacheView:
        """See :class:`PagedAttention`."""
        if self._view is None or self._view[0] is not self.kv_cache:
            views = {CPU_PAGE_ORDER: view_pages, SHUFFLED: view_shuffled}
            make = views.get(self.kernel.order, KVCacheView.of_packed)
            view = make(self.kv_cache.view(self.cache_dtype), self.spec.qkv.head_dim)
            self._view = (self.kv_cache, replace(view, k_scale=self.k_scale, v_scale=self.v_scale))
        return self._view[1]

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :class:`BaseAttention`; a compiler sees one op, an eager run calls straight through."""
        out = qkv.new_empty(qkv.shape[0], self.spec.qkv.num_heads, self.spec.qkv.head_dim)
        if self._through_op:
            torch.ops.atom.attention(qkv, positions, out, self._encoded_name)
        else:
            _attention(qkv, positions, out, self._encoded_name)
        return out.flatten(1)


class FrameworkAttention(BaseAttention):
    """Our model on vLLM's own attention layer and the platform's backend (``ATOM_DISABLE_VLLM_ATTENTION=1``)."""

    def __init__(self, spec: AttentionSpec, weights: QkvWeights, sinks: torch.Tensor | None, runtime: Runtime) -> None:
        super().__init__(spec)
        vllm_config = get_current_vllm_config()
        self.weights = weights
        # Backends want them in the model's dtype; ours stay as they are loaded.
        self.sinks = None if sinks is None else (sinks, torch.empty_like(sinks, dtype=runtime.dtype))
        self.prepare = runtime.kernels.select(QK_NORM_ROPE, spec.qkv)
        self.attention = VllmAttention(
            spec.qkv.num_heads,
            spec.qkv.head_dim,
            spec.scale,
            num_kv_heads=spec.qkv.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=None,
            logits_soft_cap=spec.soft_cap,
            per_layer_sliding_window=spec.window,
            prefix=spec.name,
            **({} if self.sinks is None else {"sinks": self.sinks[1]}),
        )

    def set_scales(self, key: float, value: float) -> None:
        """See :class:`BaseAttention`: backends read them from vLLM's layer, some as tensors, some as numbers."""
        super().set_scales(key, value)
        layer = self.attention
        for scale, on_device, on_host in (
            (key, layer._k_scale, layer._k_scale_cpu),
            (value, layer._v_scale, layer._v_scale_cpu),
        ):
            on_device.fill_(scale)
            on_host.fill_(scale)
        layer._k_scale_float, layer._v_scale_float = key, value

    def hand_over(self) -> None:
        """When all weights are loaded: the sinks, and again the scales, for vLLM's layer goes back to scales of 1."""
        self.set_scales(self.k_scale, self.v_scale)
        if self.sinks is not None:
            loaded, given = self.sinks
            given.copy_(loaded)

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :class:`BaseAttention`."""
        q, k, v = self.prepare(qkv, positions, self.weights)
        attended: torch.Tensor = self.attention(q.flatten(1), k.flatten(1), v.flatten(1))
        return attended


@eager_break_during_capture
@maybe_transfer_kv_layer
def _attention(qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType) -> None:
    layer: VllmPagedAttention = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.attend(qkv, positions, out)


def _attention_fake(qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType) -> None:
    return None


library = Library("atom", "FRAGMENT")  # an op lives as long as its library
direct_register_custom_op(
    "attention",
    _attention,
    # Kernels may rotate and norm in place in qkv, which nobody reads afterwards.
    mutates_args=["qkv", "out"],
    fake_impl=_attention_fake,
    target_lib=library,
)
