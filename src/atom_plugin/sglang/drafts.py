"""Chains of draft tokens on our attention backend (EAGLE, NEXTN and STANDALONE drafts with one candidate a step).

The plug-in registers the two hooks of this file (:mod:`atom_plugin.sglang` says why). Each calls SGLang's own method
unless the draft runs on our backend.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import attention_backends, get_spec
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

from atom_plugin.sglang import BACKEND, our_backends
from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend
from atom_plugin.sglang.speculation import check_chain
from atom_plugin.sglang.updates import AtomModel

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

#: Indices of the phases in SGLang's pair of attention backends.
_PREFILL, _DECODE = 0, 1


class ChainDraftBackend:
    """The backends of a draft that decodes a chain of ``num_steps`` tokens: one for each token but the last.

    Metadata is prepared once for all steps. SGLang then runs each step on its own backend of :attr:`attn_backends`.

    Args:
        runner: the draft's runner.
        num_steps: tokens of the chain. The last one needs no step, since nothing is decoded from it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner, num_steps: int) -> None:
        self.num_steps = num_steps
        # SGLang sets these names on the backends that it makes.
        self.prefill_attention_backend_str = self.decode_attention_backend_str = BACKEND
        self.attn_backends = [_named(AtomAttentionBackend(runner, step)) for step in range(1, num_steps)]
        self.kv_index_translator = runner.kv_index_translator

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Called before eager steps."""
        for backend, batch in self._steps(forward_batch):
            backend.init_forward_metadata(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called before graphs are captured."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Called before a capture or a replay; each step has its own buffer for its slots."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Called at the start of each captured graph, for all of its steps."""
        for backend, batch in self._steps(forward_batch):
            backend.init_forward_metadata_in_graph(batch)

    def _steps(self, forward_batch: ForwardBatch) -> list[tuple[AtomAttentionBackend, ForwardBatch]]:
        """Each backend with the batch of its step; slots and lengths differ by step."""
        if forward_batch.forward_mode.is_idle():
            return [(backend, forward_batch) for backend in self.attn_backends]
        slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, forward_batch.batch_size, 1, self.num_steps)
        steps = []
        for step, backend in enumerate(self.attn_backends):
            batch = copy.copy(forward_batch)
            batch.out_cache_loc = slots[step]
            steps.append((backend, batch))
        return steps


def _named(backend: AtomAttentionBackend) -> AtomAttentionBackend:
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = BACKEND
    return backend


def create_decode_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> Any:
    """The backends that decode the chain; None if there is nothing to decode, as in SGLang's own method."""
    if not _is_ours(factory, _DECODE):
        return original(factory)
    check_chain(factory.topk)
    if factory.speculative_num_steps <= 1:
        return None
    return ChainDraftBackend(factory.draft_model_runner, factory.speculative_num_steps)


def create_draft_extend_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> Any:
    """The backend that writes the draft's keys and values of accepted tokens."""
    if not _is_ours(factory, _DECODE if get_spec().speculative_attention_mode == "decode" else _PREFILL):
        return original(factory)
    return _named(AtomAttentionBackend(factory.draft_model_runner))


def _is_ours(factory: DraftBackendFactory, phase: int) -> bool:
    """Whether the draft uses our attention: by the backend named for drafts, else by the target's in this phase."""
    name = factory.draft_attn_backend or attention_backends()[phase]
    # ROCM_BACKEND is our attention only for our models.
    return bool(name == BACKEND or (name in our_backends() and isinstance(factory.draft_model_runner.model, AtomModel)))
