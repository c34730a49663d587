"""Our kernels compiled before SGLang captures graphs and takes requests, so that no request waits for it.

SGLang asks a model to prepare itself (``prepare_before_cuda_graph_capture``) in each process with a GPU once pools are
there, with graphs and without. Then our model runs on batches that have all that kernels are compiled for. They have no
ForwardBatch: layers read :class:`WarmUpStep` in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.dp_attention import set_dp_buffer_len
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec, max_prefill_buffer_tokens

from atom_core.batch import Batch, BatchShape
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.draft import DraftModel
from atom_core.runtime import Runtime
from atom_core.warmup import StateKind, batches_to_serve, batches_to_verify, run_batch
from atom_plugin.sglang.attention import SglangRadixAttention, WarmUpStep, linear_layers
from atom_plugin.sglang.attention_backend.kv_view import Pools
from atom_plugin.sglang.attention_backend.states import StatePool

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def warm_up(model: DecoderForCausalLM | DraftModel, runtime: Runtime, runner: ModelRunner) -> None:
    """Run ``model`` on every batch of :func:`batches`; all ranks have to, and run the same ones.

    Args:
        model: loaded, in ``runner``.
        runtime: what it was built with.
        runner: its pools made.
    """
    # Another backend of SGLang's may have pools that ours does not read.
    ours = any(isinstance(module, SglangRadixAttention) for module in model.modules())
    pools = Pools(runner) if ours else None
    states = StatePool(runner.req_to_token_pool) if any(True for _ in linear_layers(model)) else None
    table_width = 1 if pools is None else pools.table_width(int(runner.model_config.context_len))
    ranks = runtime.data_parallel.world_size

    @contextmanager
    def announce(batch: Batch) -> Iterator[WarmUpStep]:
        if ranks > 1:
            tokens = batch.num_tokens
            set_dp_buffer_len(tokens * ranks, tokens, True, [tokens] * ranks)
        yield WarmUpStep(batch, pools, states)

    for shape, kind in batches(model, runtime, runner):
        run_batch(shape, model, runtime, table_width, announce, kind, torch.int64)


def batches(
    model: DecoderForCausalLM | DraftModel, runtime: Runtime, runner: ModelRunner
) -> list[tuple[BatchShape, StateKind]]:
    """All that ``model`` may serve with these server arguments, and what such batches have of states."""
    max_requests, longest = int(runner.max_running_requests), int(runner.model_config.context_len)
    tokens = max_prefill_buffer_tokens() or get_schedule().max_prefill_tokens or longest
    tokens = min(max(tokens, max_requests), int(runner.max_total_num_tokens))
    plain = StateKind(copies=get_exec().mamba.enable_mamba_extra_buffer)
    found = [(shape, plain) for shape in batches_to_serve(model, runtime, max_requests, tokens, longest)]
    to_verify = 0 if runner.is_draft_worker else get_spec().speculative_num_draft_tokens or 0
    if to_verify:
        # What was accepted is copied to a request's slot, and to that of its prefix, after the step.
        verifying = batches_to_verify(model, runtime, max_requests, longest, to_verify)
        found += [(shape, StateKind(verifies=True)) for shape in verifying]
    return found
