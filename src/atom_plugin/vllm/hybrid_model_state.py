"""The model state of hybrids in vLLM's model runner V2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from atom_plugin.vllm.sampling import AtomModelState
from atom_plugin.vllm.states import state_block_size

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

#: A column that no state is in.
_UNKNOWN = -2


class AtomHybridModelState(AtomModelState, MambaHybridModelState):
    """vLLM's model state for layers with states, which it moves between blocks, with the greedy sampler.

    In each step vLLM counts the drafts that were accepted, and with prefix caching it looks on the GPU for states to
    move or to keep: 32 programs for each request and tensor of states. Without drafts the host knows each request's
    length, so these kernels are launched only where they have something to do.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: By request, the column of its row in the block table that has its state: as vLLM's own table on the GPU.
        self.columns = np.full(self.max_num_reqs, _UNKNOWN)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """See vLLM."""
        super().add_request(req_index, new_req_data)
        self.columns[req_index] = _UNKNOWN

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """See vLLM, which moves states of requests that go on to another block."""
        block_size = state_block_size(self.vllm_config)
        if self.vllm_config.speculative_config is None and block_size is not None:
            lengths = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
            rows, columns = input_batch.idx_mapping_np, (lengths - 1) // block_size
            if (self.columns[rows] == columns).all():
                return
            assert self._get_mamba_group_info(kv_cache_config)[1].block_size == block_size
            self.columns[rows] = columns
        super().preprocess_state(input_batch, block_tables, kv_cache_config, num_computed_tokens)

    def postprocess_state(self, *args: Any, **options: Any) -> None:
        """See vLLM, which counts accepted drafts and keeps the states behind them."""
        if self.vllm_config.speculative_config is not None:
            super().postprocess_state(*args, **options)

    def prepare_attn(self, input_batch: InputBatch, *args: Any, **options: Any) -> dict[str, Any]:
        """See vLLM.

        A prompt of one token that comes while other requests verify drafts is padded with drafts that stand for none.
        Since 0.31 vLLM does not say of such a row that it verifies, unless some of its tokens were computed before, and
        layers would keep the state after the padding.
        """
        drafts = input_batch.num_draft_tokens_per_req
        runs_as_decode = getattr(input_batch, "prefill_runs_as_decode_np", None)
        if drafts is not None and runs_as_decode is not None:
            padded = runs_as_decode | (input_batch.is_prefilling_np & (drafts > 0))
            input_batch = replace(input_batch, prefill_runs_as_decode_np=padded)
        prepared: dict[str, Any] = super().prepare_attn(input_batch, *args, **options)
        return prepared
