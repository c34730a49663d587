"""The core's PagedAttention as layers of vLLM's: over pages and over states, with one custom op.

The op ``atom::token_mixer`` takes what the projections give; norms, rope, the cache write and attention happen inside
it, where the layer's cache is known. Piecewise graphs split on it. It finds its layer by name in vLLM's forward
context, as vLLM's own attention op does.

No ``from __future__ import annotations`` here: an op's schema is read from its real annotations.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.library import Library
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from atom_core.batch import Batch
from atom_core.cache import Cache, StateSpec
from atom_core.mixers.base import PagedAttention, TokenMixer
from atom_core.runtime import Runtime
from atom_plugin.vllm.attention_backends import CACHES
from atom_plugin.vllm.states import shapes_of_slot, state_backend, view_states

OP_NAME = "atom::token_mixer"


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


def batch_of(layer_name: str) -> Batch | None:
    """This step's batch for a layer; None in a run without one."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        # Model runner V1 (goes with vLLM 0.32's support): one entry a micro-batch, and ours is never split.
        metadata = metadata[0]
    return metadata.get(layer_name) if isinstance(metadata, Mapping) else None


class VllmLayer(PagedAttention, AttentionLayerBase):
    """A token mixer as a layer of vLLM's.

    Raises:
        ValueError: another layer has the mixer's name.
    """

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer, runtime)
        self.layer_name = mixer.name
        self.num_heads = mixer.heads[0]  # vLLM groups layers by it
        self.kv_cache: Any = torch.tensor([])
        self._cache: tuple[Any, Cache] | None = None
        vllm_config = get_current_vllm_config()
        self.max_requests = vllm_config.scheduler_config.max_num_seqs
        compilation = vllm_config.compilation_config
        if mixer.name in compilation.static_forward_context:
            raise ValueError(f"Two attention layers are named {mixer.name!r}.")
        compilation.static_forward_context[mixer.name] = self
        # An empty list means that the user wants no splitting; None is filled with defaults before models are built.
        if compilation.splitting_ops and OP_NAME not in compilation.splitting_ops:
            compilation.splitting_ops.append(OP_NAME)
        self._encoded_name = _encode_layer_name(mixer.name)
        self._through_op = is_compiled(vllm_config)

    @property
    def has_memory(self) -> bool:
        """Whether vLLM has bound memory to the layer, which it does after profiling."""
        return len(self.kv_cache) > 0

    @abstractmethod
    def view(self) -> Cache:
        """View the memory that vLLM has bound to the layer."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See vLLM; the model finalizes all its weights itself."""

    def batch(self) -> Batch | None:
        """See :class:`PagedAttention`."""
        return batch_of(self.layer_name)

    def cache(self) -> Cache:
        """See :class:`PagedAttention`."""
        if self._cache is None or self._cache[0] is not self.kv_cache:
            self._cache = (self.kv_cache, self.mixer.scaled(self.view()))
        return self._cache[1]

    def forward(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :class:`BaseAttention`; a compiler sees one op, an eager run calls straight through."""
        out = self.mixer.empty_output(inputs)
        first, second = inputs if len(inputs) == 2 else (inputs[0], None)
        mix = torch.ops.atom.token_mixer if self._through_op else _token_mixer
        mix(first, second, positions, out, self._encoded_name)
        return out.flatten(1)


class VllmPagedAttention(VllmLayer):
    """A token mixer over pages."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer, runtime)
        self.spec = mixer.cache_spec
        self.kind = CACHES[type(self.spec)]

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See vLLM."""
        return self.kind.backend(self.mixer, self.spec)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """See vLLM; asked after the block size is final."""
        return self.kind.spec(self.spec, vllm_config.cache_config)

    def view(self) -> Cache:
        """See :class:`VllmLayer`."""
        return self.kind.view(self.spec, self.kv_cache)


class VllmLinearAttention(VllmLayer, MambaBase):
    """A token mixer over states, one or more slots a request; vLLM cuts :attr:`kv_cache` into its tensors."""

    mamba_type = MambaAttentionBackendEnum.GDN_ATTN

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer, runtime)
        spec = mixer.cache_spec
        assert isinstance(spec, StateSpec)
        self.spec, self.num_drafts = spec, get_current_vllm_config().num_speculative_tokens

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See vLLM."""
        return state_backend(self.mixer)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """See vLLM."""
        return shapes_of_slot(self.spec, self.num_drafts)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """See vLLM."""
        return self.spec.dtypes

    def view(self) -> Cache:
        """See :class:`VllmLayer`."""
        return view_states(self.kv_cache)


@eager_break_during_capture
def _token_mixer(
    first: torch.Tensor,
    second: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    # The inputs come one by one: of a list, a captured graph would keep the tensors from being reused by others.
    inputs = (first,) if second is None else (first, second)
    layer: VllmLayer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    if isinstance(layer, VllmPagedAttention):
        _attend_to_pages(layer, inputs, positions, out, layer_name)
    else:
        layer.attend(inputs, positions, out)


@maybe_transfer_kv_layer  # of pages alone: vLLM's own layers with states do not either
def _attend_to_pages(
    layer: VllmLayer,
    inputs: Sequence[torch.Tensor],
    positions: torch.Tensor,
    out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    layer.attend(inputs, positions, out)


def _token_mixer_fake(
    first: torch.Tensor,
    second: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    return None


library = Library("atom", "FRAGMENT")  # an op lives as long as its library
direct_register_custom_op(
    "token_mixer",
    _token_mixer,
    # Kernels may norm and rotate in place in the first input, which nobody reads afterwards.
    mutates_args=["first", "out"],
    fake_impl=_token_mixer_fake,
    target_lib=library,
)
