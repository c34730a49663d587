"""``--attention-backend atom``: SGLang's backend interface over the core's ops.

Our models pass their raw qkv and get the fused step. A model of SGLang's own passes q, k and v after norms
and rope: the pool writes them, and the same kernel attends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from atom_core.batch import Batch
from atom_core.cache import Cache
from atom_core.kernels.attention import ATTENTION, PagedAttentionKernel, PagedAttentionSpec
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.select import Target
from atom_core.updates import ModelWeights
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import load_settings
from atom_plugin.sglang.attention import has_no_token
from atom_plugin.sglang.attention_backend.batch import eager_batch, planned, windowed
from atom_plugin.sglang.attention_backend.graph_state import PADDED_LENGTH, GraphState
from atom_plugin.sglang.attention_backend.kv_view import Pools
from atom_plugin.sglang.gpu_kernels import gpu_kernels
from atom_plugin.sglang.kernels import check_order, unfit_pages

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention as HostAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from atom_core.mixers.base import TokenMixer
    from atom_plugin.sglang.attention import SglangRadixAttention


class AtomAttentionBackend(AttentionBackend):
    """See the module's text. It is also the step that the core's RadixAttention reads (:meth:`lookup`).

    Args:
        runner: SGLang's runner, its pools made.
        step: of a draft that decodes several tokens in a row: how many it has decoded before this backend runs.
    """

    #: So SGLang does not wait for the GPU to count the accepted tokens.
    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner, step: int = 0) -> None:
        super().__init__()
        self.pools = Pools(runner)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len = int(runner.model_config.context_len)
        self.dtype: torch.dtype = runner.dtype
        settings, target = load_settings(), Target.of(self.pools.req_to_token.device)
        check_order(settings)  # no model of ours has checked it where the model is SGLang's
        self.kernels = chosen_kernels(target, settings, gpu_kernels(), unfit_pages(self.pools.page_size))
        self.step = step
        self.graphs: GraphState | None = None
        self.forward_metadata: Batch | None = None
        self.windowed_metadata: Batch | None = None
        self._kernels_by_layer: dict[int, PagedAttentionKernel] = {}
        if self.pools.latent:
            _refuse_native(runner)
        self.runner = runner

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Before an eager step."""
        self._check_weights()
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = self.windowed_metadata = None
            return
        batch = eager_batch(forward_batch, self.pools, self.max_context_len, self.step)
        self.forward_metadata = batch
        self.windowed_metadata = windowed(batch, self.pools) if self.pools.hybrid else batch

    def _check_weights(self) -> None:
        """A replayed graph does not call our model, which checks that its weights are complete."""
        weights = getattr(self.runner.model, "weights", None)
        if isinstance(weights, ModelWeights):
            weights.check_ready()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before graphs are captured."""
        self.graphs = GraphState(max_bs, max_num_tokens, self.max_context_len, self.pools, self.kernels, self.step)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before a capture or a replay."""
        assert self.graphs is not None, "SGLang announces graphs before it captures them"
        if not in_capture:
            self._check_weights()
        self.forward_metadata, self.windowed_metadata = self.graphs.plan(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """What each graph begins with."""
        assert self.graphs is not None, "SGLang announces graphs before it captures them"
        self.graphs.fill(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a padded request."""
        return PADDED_LENGTH

    def lookup(self, mixer: TokenMixer) -> tuple[Batch, Cache]:
        """See :class:`atom_core.mixers.base.Step`."""
        index = mixer.layer_index
        return planned(self._batch(index), mixer), self.pools.cache(mixer.cache_spec, index)

    def _batch(self, layer_index: int) -> Batch:
        batch = self.windowed_metadata if self.pools.is_windowed(layer_index) else self.forward_metadata
        assert batch is not None, "SGLang plans a batch before it runs it"
        return batch

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: HostAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        atom_layer: SglangRadixAttention | None = None,
        atom_inputs: tuple[torch.Tensor, ...] = (),
        **others: Any,
    ) -> torch.Tensor:
        """Attention of the step's tokens: ``[T, H * D]``."""
        if atom_layer is not None:
            rows = q.shape[0]  # SGLang has cut padded rows off q, and not off our inputs
            fits = all(len(it) == rows for it in atom_inputs)
            inputs = atom_inputs if fits else [it[:rows] for it in atom_inputs]
            return atom_layer.attend(inputs, self, _wanted(forward_batch))
        return self._plain(q, k, v, layer, forward_batch, save_kv_cache, others)

    forward_decode = forward_extend

    def _plain(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: HostAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """A layer of SGLang's own."""
        sinks = others.pop("sinks", None)
        self._refuse(layer, others)
        heads, dim = layer.tp_q_head_num, layer.head_dim
        wanted = _wanted(forward_batch)
        out = q.new_empty(q.shape[0], heads * dim) if wanted is None else wanted
        if has_no_token(forward_batch):
            return out.zero_()
        batch = self._batch(layer.layer_id)
        if save_kv_cache and k is not None:
            slots = self.windowed_metadata.pages.slots if self.pools.hybrid and self.windowed_metadata else None
            target = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=slots)
            self.token_to_kv_pool.set_kv_buffer(layer, target, k, v, layer.k_scale, layer.v_scale)
        scales = (1.0, 1.0)
        if self.pools.dtype in FP8_DTYPES:  # else the pool has not divided by them
            scales = _scale(layer.k_scale, layer.k_scale_float), _scale(layer.v_scale, layer.v_scale_float)
        view, rows = self.pools.view(layer.layer_id, *scales), batch.num_tokens
        queries, outputs = q.view(-1, heads, dim), out.view(-1, heads, dim)
        self._kernel(layer, sinks is not None)(queries[:rows], view, batch, sinks, outputs[:rows])
        return out

    def _refuse(self, layer: HostAttention, others: dict[str, Any]) -> None:
        wanted = sorted(name for name, value in others.items() if value is not None and value is not False)
        for refused, what in (
            (bool(wanted), f"what this model passes to attention ({', '.join(wanted)})"),
            (layer.v_head_dim != layer.qk_head_dim, "heads whose keys and values differ in size"),
            (layer.is_cross_attention or layer.attn_type != AttentionType.DECODER, "attention that is not causal"),
        ):
            if refused:
                raise ValueError(f"--attention-backend atom does not support {what}; name another backend.")

    def _kernel(self, layer: HostAttention, sinks: bool) -> PagedAttentionKernel:
        if layer.layer_id not in self._kernels_by_layer:
            spec = PagedAttentionSpec(
                num_heads=layer.tp_q_head_num,
                num_kv_heads=layer.tp_k_head_num,
                head_dim=layer.head_dim,
                scale=layer.scaling,
                dtype=self.dtype,
                cache_dtype=self.pools.dtype,
                # SGLang counts the tokens before the query's own; -1 is no window.
                window=layer.sliding_window_size + 1 if layer.sliding_window_size >= 0 else None,
                soft_cap=layer.logit_cap or None,
                sinks=sinks,
            )
            self._kernels_by_layer[layer.layer_id] = self.kernels.select(ATTENTION, spec)
        return self._kernels_by_layer[layer.layer_id]

    def support_triton(self) -> bool:
        """Whether SGLang may prepare batches with Triton kernels: wherever there is a GPU."""
        return self.pools.req_to_token.is_cuda


def _refuse_native(runner: ModelRunner) -> None:
    """SGLang's own models pass latents in forms that our kernels do not read."""
    from atom_plugin.sglang.updates import AtomModel  # imports us

    if not isinstance(runner.model, AtomModel):
        raise ValueError(
            f"--attention-backend atom has MLA only for our own models, not for SGLang's "
            f"{type(runner.model).__name__}; name another --attention-backend."
        )


def _wanted(batch: ForwardBatch) -> torch.Tensor | None:
    """SGLang's output tensor ``[T, H * D]``, which the next captured graph reads; None: a new one."""
    out: torch.Tensor | None = getattr(batch, "_attn_output", None)
    return out


def _scale(scale: torch.Tensor | float | None, number: float | None) -> float:
    """A scale of SGLang's layer: a checkpoint gives a tensor and its number, a file gives only the number."""
    return number or (scale if isinstance(scale, float) else 1.0)
