"""Our kernels in vLLM's own warm-up: compiled in each worker before graphs are captured and the server is ready.

vLLM's models announce what is to be compiled in a registry of the model runner, open while a model is built; a worker
goes through it once the cache is there, unless the user has switched ``--kernel-config.enable_jit_warmup`` off, as
``--enforce-eager`` does. We announce whole batches: what they compile is the kernels' business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width

from atom_core.batch import Batch, BatchShape
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.draft import DraftModel
from atom_core.runtime import Runtime
from atom_core.warmup import StateKind, batches_to_serve, keeps_states, run_batch
from atom_plugin.vllm.attention import VllmLayer
from atom_plugin.vllm.states import state_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ModelWarmUp(VllmJitKernel[BatchShape]):
    """Every batch of :func:`atom_core.warmup.batches_to_serve`, each as one key of vLLM's registry."""

    CompileKey = BatchShape

    def __init__(self, model: DecoderForCausalLM | DraftModel, runtime: Runtime, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.model, self.runtime, self.vllm_config = model, runtime, vllm_config

    def get_warmup_keys(self) -> list[BatchShape]:
        """See vLLM."""
        scheduler = self.vllm_config.scheduler_config
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.vllm_config.model_config.max_model_len
        return batches_to_serve(self.model, self.runtime, *limits, 1 + self.vllm_config.num_speculative_tokens)

    def compile(self, compile_key: BatchShape) -> None:
        """See vLLM."""
        page_size, longest = self.vllm_config.cache_config.block_size, self.vllm_config.model_config.max_model_len
        table_width = get_block_table_width(cdiv(longest, page_size), page_size)
        for states in self._state_kinds(compile_key):
            run_batch(compile_key, self.model, self.runtime, table_width, self._announce, states)

    def _state_kinds(self, shape: BatchShape) -> Iterator[StateKind]:
        """The kinds of states that batches of a shape have; see :class:`.states.AtomStateMetadataBuilder`."""
        drafts = self.vllm_config.num_speculative_tokens
        kind = StateKind(1 + drafts, drafts > 0, drafts > 0, block_size=state_block_size(self.vllm_config))
        yield kind
        # The older runner's steps with padded prompts, whose states are copied.
        older = not self.vllm_config.use_v2_model_runner
        if drafts and older and shape.max_query_len > 1 and keeps_states(self.model):
            yield replace(kind, copies=True)

    @contextmanager
    def _announce(self, batch: Batch) -> Iterator[None]:
        layers = [layer for layer in self.model.modules() if isinstance(layer, VllmLayer)]
        # vLLM's own attention layers have metadata of their own; without any they give zeros, as when profiling.
        known = {layer.layer_name: batch for layer in layers if layer.has_memory}
        # Data-parallel ranks that share experts exchange tokens here as well: all run the same batches.
        tokens, ranks = batch.num_tokens, self.vllm_config.parallel_config.data_parallel_size
        each = torch.full((ranks,), tokens, dtype=torch.int32, device="cpu")
        with set_forward_context(known or None, self.vllm_config, num_tokens=tokens, num_tokens_across_dp=each):
            yield


def register_warm_up(model: DecoderForCausalLM | DraftModel, runtime: Runtime, vllm_config: VllmConfig) -> None:
    """Have vLLM warm ``model`` up, if it is being built by a runner that does; on a CPU nothing is compiled."""
    if runtime.device.type != "cpu":
        ModelWarmUp(model, runtime, vllm_config).register_warmup()
