"""The core's PagedMlaAttention as a vLLM attention layer, over vLLM's cache of latents: one row a token, no heads.

The op ``atom::mla_attention`` takes queries and latents raw: norm, rope, the cache write and attention happen inside
it. What else there is to such a layer is as for one with keys and values; see :mod:`atom_plugin.vllm.attention`.

No ``from __future__ import annotations`` here: an op's schema is read from its real annotations.
"""

from dataclasses import fields, replace

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec as VllmAttentionSpec
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, get_kv_quant_mode

from atom_core.attention.mla import MlaLayerSpec, PagedMlaAttention
from atom_core.batch import Batch, HostLengths
from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.mla_cache import MlaWeights
from atom_core.runtime import Runtime
from atom_plugin.vllm.attention import AtomAttentionBackend, AtomMetadataBuilder, announce, library, metadata_of

OP_NAME = "atom::mla_attention"


class LatentMetadataBuilder(AtomMetadataBuilder):
    """Tells the host's lengths too: by them it is planned which prompts have their latents expanded."""

    def __init__(
        self,
        kv_cache_spec: VllmAttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Drafts that are verified are decodes: a few queries each behind a long context.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def host_lengths(self, common: CommonAttentionMetadata) -> HostLengths | None:
        """None where all requests decode, as in captured graphs."""
        lengths = common.seq_lens_cpu_upper_bound
        if lengths is None or common.max_query_len <= self.decode_threshold:
            return None
        count = common.num_reqs
        return HostLengths(common.query_start_loc_cpu[: count + 1].tolist(), lengths[:count].tolist())


class LatentGraphMetadataBuilder(LatentMetadataBuilder):
    """For kernels that captured graphs may replay: of decodes, for prompts go another way."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class LatentBackend(AtomAttentionBackend):
    """Rows of latents, eager or piecewise."""

    @staticmethod
    def get_name() -> str:
        """See vLLM."""
        return "ATOM_MLA"

    @staticmethod
    def get_builder_cls() -> type[AtomMetadataBuilder]:
        """See vLLM."""
        return LatentMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """See vLLM."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """See vLLM."""
        return False


class LatentGraphBackend(LatentBackend):
    """Rows of latents, with full graphs of decodes."""

    @staticmethod
    def get_builder_cls() -> type[AtomMetadataBuilder]:
        """See vLLM."""
        return LatentGraphMetadataBuilder


class VllmMlaAttention(PagedMlaAttention, AttentionLayerBase):
    """An attention layer of ours over latents in vLLM's eyes."""

    def __init__(self, spec: MlaLayerSpec, weights: MlaWeights, runtime: Runtime) -> None:
        super().__init__(spec, weights, runtime)
        self.layer_name = spec.name
        self.num_heads = spec.latent.num_heads  # vLLM groups layers by it
        self.cache_dtype = runtime.cache_dtype
        self.kv_cache = torch.tensor([])
        self._view: tuple[torch.Tensor, LatentCacheView] | None = None
        self._encoded_name, self._through_op = announce(self, spec.name, OP_NAME, get_current_vllm_config())

    @property
    def planner(self) -> "VllmMlaAttention":
        """What plans a step for all layers like this one."""
        return self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See vLLM."""
        return LatentGraphBackend if self.graph_support == "always" else LatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """See vLLM; asked after the block size is final. What is FP8 is bytes to vLLM."""
        cache = vllm_config.cache_config
        # All ranks hold all latents; vLLM 0.30 does not ask.
        whole = {"max_tp_shards": 1} if "max_tp_shards" in {it.name for it in fields(MLAAttentionSpec)} else {}
        return MLAAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=1,
            head_size=self.spec.latent.row,
            dtype=torch.uint8 if self.cache_dtype in FP8_DTYPES else self.cache_dtype,
            cache_dtype_str=cache.cache_dtype,
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
            **whole,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See vLLM; the model finalizes all its weights itself."""

    def batch(self) -> Batch | None:
        """See :class:`PagedMlaAttention`."""
        return metadata_of(self.layer_name)

    def cache(self) -> LatentCacheView:
        """See :class:`PagedMlaAttention`; vLLM's pages have one head."""
        if self._view is None or self._view[0] is not self.kv_cache:
            rows = self.kv_cache.view(self.cache_dtype)
            view = LatentCacheView(rows.squeeze(1) if rows.dim() == 4 else rows)
            self._view = (self.kv_cache, replace(view, scale=self.k_scale))
        return self._view[1]

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, step: object = None
    ) -> torch.Tensor:
        """See :class:`BaseMlaAttention`; a compiler sees one op, an eager run calls straight through."""
        out = self.empty(q)
        call = torch.ops.atom.mla_attention if self._through_op else _mla_attention
        call(q, latent, positions, out, self._encoded_name)
        return out.flatten(1)


@eager_break_during_capture
@maybe_transfer_kv_layer
def _mla_attention(
    q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType
) -> None:
    layer: VllmMlaAttention = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.attend(q, latent, positions, out)


def _mla_attention_fake(
    q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType
) -> None:
    return None


direct_register_custom_op(
    "mla_attention",
    _mla_attention,
    mutates_args=["q", "out"],
    fake_impl=_mla_attention_fake,
    target_lib=library,
)
