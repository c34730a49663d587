"""Linear attention on our kernels, inside SGLang's backend for models that have both kinds of attention.

SGLang's hybrid backend asks two others: ours or one of SGLang's for layers of full attention, and
:class:`AtomLinearAttention` for the others. Its own for Gated DeltaNet runs on SGLang's kernels only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend, MambaAttnBackendBase

from atom_core.batch import Batch, Snapshots, States
from atom_core.cache import Cache
from atom_plugin.sglang.attention import StateLayer, linear_layers
from atom_plugin.sglang.attention_backend.batch import Shape, planned, requests_of
from atom_plugin.sglang.attention_backend.states import StatePool, states_of, wanted_slots

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from atom_core.mixers.base import TokenMixer


@dataclass(frozen=True)
class Slots:
    """What SGLang's hybrid backend reads of a linear backend's metadata to keep what was accepted of drafts."""

    mamba_cache_indices: torch.Tensor
    """int32 ``[R]``."""


class AtomLinearAttention(MambaAttnBackendBase):
    """See the module's text. It is also the step that the core's RadixAttention reads (:meth:`lookup`).

    Args:
        runner: SGLang's runner, its pools made, with one of our models.

    Raises:
        ValueError: the pool of states was made for another model.
    """

    needs_cpu_seq_lens = False
    #: :class:`Slots`, or None before an idle step.
    forward_metadata: Any

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.states = StatePool(runner.req_to_token_pool)
        for layer in linear_layers(runner.model):
            self.states.check(layer.spec, layer.layer_id)
        self.conv_states_shape = runner.req_to_token_pool.mamba_pool.mamba_cache.conv[0].shape
        self.max_context_len = int(runner.model_config.context_len)
        self.graphs: StateGraphs | None = None
        self.batch: Batch | None = None
        #: Whether the step may have rows of no request, which other layers read.
        self._has_padding = False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Before an eager step."""
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            self.batch = self.forward_metadata = None
            return
        batch = requests_of(forward_batch, self.max_context_len)
        self._set(replace(batch, states=states_of(forward_batch, self.states)))
        self._has_padding = forward_batch.global_num_tokens_cpu is not None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before graphs are captured."""
        self.graphs = StateGraphs(max_bs, self.max_context_len, self.states)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before a capture or a replay."""
        assert self.graphs is not None, "SGLang announces graphs before it captures them"
        self._set(self.graphs.plan(forward_batch, in_capture))
        self._has_padding = True

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """What each graph begins with."""
        assert self.graphs is not None, "SGLang announces graphs before it captures them"
        self.graphs.fill(forward_batch)

    def _set(self, batch: Batch) -> None:
        assert batch.states is not None
        self.batch = batch
        self.forward_metadata = Slots(batch.states.slots[:, 0])

    def lookup(self, mixer: TokenMixer) -> tuple[Batch, Cache]:
        """See :class:`atom_core.mixers.base.Step`."""
        assert self.batch is not None, "SGLang plans a batch before it runs it"
        return planned(self.batch, mixer), self.states.view(mixer.layer_index)

    def forward_extend(
        self,
        *,
        layer: StateLayer,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        linear_attn_output: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """The step's tokens in one layer: ``[1, T, Hv, V]``, in ``linear_attn_output`` if that is given.

        Args:
            layer: what the model has called.
            forward_batch: SGLang's.
            mixed_qkv, a: the two inputs of the layer's mixer, without SGLang's padding.
            linear_attn_output: see above.
            others: not used.
        """
        out = linear_attn_output
        if out is None:
            make = mixed_qkv.new_zeros if self._has_padding else mixed_qkv.new_empty
            out = make(1, mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
        layer.attend((mixed_qkv, a), forward_batch.positions[: mixed_qkv.shape[0]], self, out)
        return out

    forward_decode = forward_extend


class HybridAttention(HybridLinearAttnBackend):
    """SGLang's, with copies after a verification that a CPU has too: SGLang's are a GPU's kernels."""

    linear_attn_backend: AtomLinearAttention

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        model: object,
        req_pool_indices: torch.Tensor | None = None,
    ) -> None:
        """Keep the states after the last accepted token of each request, and those that the prefix cache wants."""
        if last_correct_step_indices.device.type != "cpu":
            # Without the requests, by whose rows SGLang's own backend writes if SGLANG_ENABLE_PP_SPEC is set.
            super().update_mamba_state_after_mtp_verify(
                last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model
            )
            return
        states, slots = self.linear_attn_backend.states, self.linear_attn_backend.forward_metadata.mamba_cache_indices
        states.commit(slots[: len(last_correct_step_indices)], last_correct_step_indices)
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            states.commit(mamba_track_indices, mamba_steps_to_track)


class StateGraphs:
    """The batches of captured graphs of up to ``max_requests`` requests, as :class:`.graph_state.GraphState` has them.

    Args:
        max_requests: requests of the largest graph.
        max_context: the longest sequence that is served.
        states: of the runner.
    """

    def __init__(self, max_requests: int, max_context: int, states: StatePool) -> None:
        device = states.pool.req_to_token.device
        self.states, self.max_context = states, max_context
        self.slots = torch.zeros(max_requests, 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.ones(max_requests, dtype=torch.int32, device=device)
        self.snapshot_slots = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._ramp = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._starts: dict[int, torch.Tensor] = {1: self._ramp}
        self._one = torch.ones(max_requests, dtype=torch.int32, device=device)
        self._every = torch.ones(max_requests, dtype=torch.bool, device=device)
        self._plans: dict[Shape, Batch] = {}

    def plan(self, forward_batch: ForwardBatch, in_capture: bool) -> Batch:
        """The batch of a graph, when it is captured and before each replay."""
        shape = Shape.of(forward_batch)
        if in_capture:
            self._plans[shape] = self._plan(shape, forward_batch)
        return replace(self._plans[shape])  # another step has an empty scratch

    def fill(self, forward_batch: ForwardBatch) -> None:
        """Fill the tensors, first in the graph of ``forward_batch``, whose tensors are the runner's static ones."""
        shape = Shape.of(forward_batch)
        count = shape.num_requests
        self.slots[:count, 0].copy_(self.states.slots(forward_batch.req_pool_indices[:count]))
        torch.add(forward_batch.seq_lens[:count], shape.added_tokens, out=self.seq_lens[:count])
        if _has_snapshots(forward_batch):
            self.snapshot_slots[:count].copy_(wanted_slots(forward_batch)[:count])

    def _plan(self, shape: Shape, forward_batch: ForwardBatch) -> Batch:
        count, queries_each = shape.num_requests, shape.queries_each
        assert queries_each is not None, "only batches of equal requests are captured"
        if queries_each not in self._starts:
            self._starts[queries_each] = self._ramp * queries_each
        decodes = count if queries_each == 1 else 0
        verifies = self._every[:count] if forward_batch.forward_mode.is_target_verify() else None
        snapshots = None
        if _has_snapshots(forward_batch):
            snapshots = Snapshots(self.snapshot_slots[:count], self._one[:count])
        return Batch(
            query_start_loc=self._starts[queries_each][: count + 1],
            seq_lens=self.seq_lens[:count],
            states=States(self.slots[:count], verifies=verifies, snapshots=snapshots),
            num_requests=count,
            num_tokens=shape.num_tokens,
            max_query_len=queries_each,
            max_seq_len=self.max_context,
            num_decode_requests=decodes,
            num_decode_tokens=decodes,
        )


def _has_snapshots(forward_batch: ForwardBatch) -> bool:
    """Whether a graph's step may copy states for the prefix cache; after drafts the copies come with the commit."""
    return forward_batch.mamba_track_mask is not None and not forward_batch.forward_mode.is_target_verify()


def wrap_attention(runner: ModelRunner, full: AttentionBackend) -> AttentionBackend:
    """The attention of one of our hybrid models, or of its draft, around its ``full`` attention.

    A draft of the checkpoint's own layers has full attention alone.
    """
    if runner.is_draft_worker:
        return full
    config = mambaish_config(runner.model_config)
    return HybridAttention(full, AtomLinearAttention(runner), config.full_attention_layer_ids)
