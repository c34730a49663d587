"""vLLM's side of layers that keep a state a request (Gated DeltaNet): shapes, dtypes, backend, and metadata builder.

vLLM calls such a layer "mamba". A request has ``1 + drafts`` slots, which are blocks of vLLM's pool. With
``mamba_cache_mode`` "none" they are the first columns of its block table; with "align" (prefix caching) the columns
from its newest block on, which kernels find by its length, and vLLM itself copies states from block to block before and
after a step. Its copies rely on the layout that :class:`atom_core.batch.States` describes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from atom_core.batch import Batch, Blocks, Snapshots, States
from atom_core.cache import StateSpec, StateView
from atom_core.mixers.base import TokenMixer
from atom_plugin.vllm.batches import BatchBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import MambaSpec

#: How vLLM copies a convolution's inputs and a state from block to block.
COPY_FUNCTIONS = MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func()


def state_shapes(vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
    """What a rank keeps of a request in a layer: the convolution's inputs, and the state."""
    config = vllm_config.model_config.hf_text_config
    shapes: tuple[tuple[int, ...], ...] = MambaStateShapeCalculator.gated_delta_net_state_shape(
        vllm_config.parallel_config.tensor_parallel_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        vllm_config.num_speculative_tokens,
    )
    return shapes


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Of the convolution's inputs (``--mamba-cache-dtype``) and of the state (``--mamba-ssm-cache-dtype``)."""
    cache = vllm_config.cache_config
    dtypes: tuple[torch.dtype, ...] = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return dtypes


def state_block_size(vllm_config: VllmConfig) -> int | None:
    """Every how many tokens prefix caching keeps a state; None: it does not."""
    cache = vllm_config.cache_config
    if cache.mamba_cache_mode == "none":
        return None
    size: int = cache.mamba_block_size
    return size


def shapes_of_slot(spec: StateSpec, num_drafts: int) -> tuple[tuple[int, ...], ...]:
    """``spec.shapes`` as vLLM lays them out: a row of the convolution's inputs more for each draft, of either order."""
    (rows, channels), *others = spec.shapes
    conv = (rows + num_drafts, channels)
    return (conv[::-1] if is_conv_state_dim_first() else conv, *others)


def view_states(memory: tuple[torch.Tensor, ...]) -> StateView:
    """View what vLLM binds to a layer as the core's kernels read it: of the convolution, rows before channels."""
    conv, *others = memory
    return StateView((conv.transpose(1, 2) if is_conv_state_dim_first() else conv, *others))


def state_backend(mixer: TokenMixer) -> type[AttentionBackend]:
    """See vLLM."""
    return AtomStateBackend if mixer.graph_support == "none" else AtomStateGraphBackend


class AtomStateMetadataBuilder(BatchBuilder, GDNAttentionMetadataBuilder):
    """vLLM's batch over states, once a step for each group of like layers.

    It is a child of vLLM's builder only because runners hand accepted tokens to its children alone; none of its code
    runs. Where states lie is read from vLLM's own block table, which vLLM refills in place, as captured graphs need it:
    a step without drafts runs no torch op here, which would cost a host that is behind its GPU some 20 us each. What
    the table does not say lies in tensors that are refilled in place too.

    Which requests verify drafts is said for each by itself, so a graph of decodes may also replay a prompt's last
    tokens, which model runner V1 takes for drafts if there are as many of them.
    """

    _cudagraph_support = AttentionCGSupport.NEVER
    kv_cache_spec: MambaSpec

    def __init__(
        self, kv_cache_spec: MambaSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self.take_mixers(layer_names, vllm_config)
        # V2 passes a group's metadata on to like groups, when it captures as well; V1 only when it does not capture.
        self.is_v1 = not vllm_config.use_v2_model_runner
        self.supports_update_block_table = not self.is_v1
        self.num_drafts = vllm_config.num_speculative_tokens
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=self.num_drafts > 0)
        caches_prefixes = state_block_size(vllm_config) is not None
        self.blocks = Blocks(kv_cache_spec.block_size, 1 + self.num_drafts) if caches_prefixes else None
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(vllm_config.scheduler_config.max_num_seqs, captured)
        self.num_accepted = torch.ones(rows, dtype=torch.int32, device=device)
        self.verifies = torch.zeros(rows, dtype=torch.bool, device=device)
        self.first_layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._origins: torch.Tensor | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Batch:
        """See vLLM.

        Args:
            common_prefix_len: unused.
            common_attn_metadata: the step.
            num_accepted_tokens: ``[R]``, of each request's last step. None: without drafts, in runs of no request, and
                (up to 0.31, model runner V1) in steps without drafts. V1 has 1 for a request that was not in the step
                before this one.
            num_decode_draft_tokens_cpu: ``[R]``; negative: the request does not verify drafts, or (up to 0.31) it has
                none to verify. None: as before.
            fast_build: unused.
        """
        common = common_attn_metadata
        slots = self._slots(common.block_table_tensor)
        if not self.num_drafts:
            return self.batch(common, states=States(slots, blocks=self.blocks))
        decodes = _decodes(common, num_decode_draft_tokens_cpu)
        accepted, verifies = self.num_accepted[: common.num_reqs], self.verifies[: common.num_reqs]
        verifies.copy_(torch.from_numpy(decodes), non_blocking=True)
        if self.is_v1:
            num_accepted_tokens = self._accepted(slots[:, 0], common, verifies)
        if num_accepted_tokens is None:
            accepted.fill_(1)
        elif decodes.all():
            torch.clamp(num_accepted_tokens, min=1, out=accepted)
        else:
            # Of a request that does not decode, all tokens count.
            torch.mul(num_accepted_tokens, verifies, out=accepted).clamp_(min=1)
        batch = self.batch(common, states=States(slots, accepted, verifies, blocks=self.blocks))
        if decodes[batch.num_decode_requests :].any():
            return self._with_padded_prompts(batch, decodes)
        return batch

    def _with_padded_prompts(self, batch: Batch, decodes: np.ndarray) -> Batch:
        """The step where requests that ``decodes`` has behind longer ones do not verify, as kernels cannot there.

        Those are prompts of one token, which vLLM pads with drafts that stand for none while other requests verify.
        Model runner V1 leaves a new request behind others that are new. What must be kept of it is the state after its
        first token, which is copied to its slot; that after the padding is left in a slot for drafts.
        """
        states = batch.states
        assert states is not None
        assert states.verifies is not None
        assert self.is_v1
        assert self.blocks is None, "V1 is refused with prefix caching and drafts"
        first = batch.num_decode_requests
        rows = torch.from_numpy(np.flatnonzero(decodes[first:]) + first).to(self.device)
        slots = states.slots.clone()
        copies, tokens = slots.new_zeros(len(slots)), slots.new_zeros(len(slots))
        copies[rows], tokens[rows] = slots[rows, 0], 1
        slots[rows, 0] = slots[rows, 1]
        states.verifies[rows] = False
        return replace(batch, states=replace(states, slots=slots, snapshots=Snapshots(copies, tokens)))

    def _slots(self, table: torch.Tensor) -> torch.Tensor:
        """The columns of ``table [R, N]`` that may be read, in place."""
        return table if self.blocks is not None else table[:, : 1 + self.num_drafts]

    def _accepted(self, slots: torch.Tensor, common: CommonAttentionMetadata, verifies: torch.Tensor) -> torch.Tensor:
        """``[R]``: how many tokens of a request's last step were accepted, by its length then and now.

        Model runner V1 (goes with vLLM 0.32's support, and its use on a CPU) forgets the number for a request that a
        step leaves out. A request has one slot for all its life, as prefix caching beside drafts is refused there.
        """
        if self._origins is None:
            self._origins = torch.zeros(len(self.first_layer.kv_cache[0]), dtype=torch.int32, device=self.device)
        lengths = common.query_start_loc.diff()
        computed, at = common.seq_lens - lengths, (slots * (lengths > 0)).long()
        accepted = (computed - self._origins[at]).clamp_(max=1 + self.num_drafts)
        # Of which length column 0 has the state after 1 token more.
        self._origins[at] = torch.where(verifies, computed, common.seq_lens - 1)
        return accepted

    def update_block_table(self, metadata: Batch, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Batch:
        """See vLLM: the step for another group's layers, whose states lie elsewhere."""
        table = blk_table if len(blk_table) == metadata.num_requests else blk_table[: metadata.num_requests]
        return self.planned(metadata.with_slots(self._slots(table)))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Batch:
        """See vLLM; all requests have as many drafts as there may be."""
        lengths = common_attn_metadata.query_start_loc_cpu.diff()
        accepted = torch.ones_like(common_attn_metadata.seq_lens)
        return self.build(0, common_attn_metadata, accepted, lengths - 1)


def _decodes(common: CommonAttentionMetadata, num_drafts: torch.Tensor | None) -> np.ndarray:
    """``[R]``: which requests verify drafts, or have one token after their last step's drafts."""
    starts = common.query_start_loc_cpu.numpy()
    if common.is_prefilling is None:
        decodes = np.zeros(len(starts) - 1, dtype=bool)
    else:
        decodes = (starts[1:] - starts[:-1] == 1) & ~common.is_prefilling.numpy()
    return decodes if num_drafts is None else decodes | (num_drafts.numpy() >= 0)


class AtomStateGraphMetadataBuilder(AtomStateMetadataBuilder):
    """For mixers that captured graphs may replay, but only of decodes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class AtomStateBackend(AttentionBackend):
    """States, eager or piecewise."""

    @staticmethod
    def get_name() -> str:
        """See vLLM."""
        return "ATOM_STATE"

    @staticmethod
    def get_impl_cls() -> type:
        """None: our layer has no vLLM impl."""
        # vLLM's `supports_pcp` and `supports_dcp`, for context parallelism, take this error for "no".
        raise NotImplementedError("atom layers with states run themselves; there is no AttentionImpl")

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See vLLM."""
        return AtomStateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """See vLLM."""
        return True


class AtomStateGraphBackend(AtomStateBackend):
    """States, full graphs of decodes."""

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See vLLM."""
        return AtomStateGraphMetadataBuilder
