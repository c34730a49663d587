"""Defaults of our models on a GPU: not compiled, decode in full CUDA graphs, prefill in breakable ones.

Our kernels are fused by hand, so torch.compile gains little and takes most of the start-up time. Full graphs of mixed
batches would run decodes with a prefill's kernels. Launching a prefill's kernels one by one takes longer than they run,
so they are captured between the attention layers. vLLM calls this breakable graphs; they need no torch.compile.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.config.vllm import OptimizationLevel

from atom_plugin.common.settings import load_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.atom_plugin")

#: vLLM's default; a user's -O2 looks the same.
_DEFAULT_LEVEL = OptimizationLevel.O2

#: vLLM's variable for breakable graphs, which vLLM itself sets for some of its models. Engine processes inherit it. No
#: configuration field replaces it (CONTRIBUTING.md, "Exceptions", says when this ends).
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

#: Prefill sizes in tokens that are captured in addition to vLLM's own. At these sizes a small model's prefill without
#: graphs waits for the host: eight prompts of 128 tokens on Qwen3 0.6B have a time to first token of 7.3 ms with a
#: graph and 16.8 ms without (H200).
LONGER = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
#: vLLM's own largest capture size in tokens.
_MAX_VLLM_SIZE = 512


class _Ours:
    """Whether we set the variable, so that it can be unset for a model of vLLM's own in the same process."""

    is_set = False


def set_graph_defaults(vllm_config: VllmConfig) -> None:
    """Set the compilation and graph modes that the user did not set. vLLM's own defaults are not filled in yet.

    The user's modes are kept, and so is an optimization level other than vLLM's default. ``--enforce-eager``, breakable
    graphs and ``TORCH_COMPILE_DISABLE`` have already set the compilation mode. If the user asks for piecewise graphs
    where graphs cannot be breakable, the compilation mode is left to vLLM, which compiles.
    """
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if not (compilation.mode is None or _by_our_variable(vllm_config)):
        return
    if vllm_config.optimization_level != _DEFAULT_LEVEL:
        return
    if not current_platform.is_cuda_alike():
        return
    graphs = compilation.cudagraph_mode
    if current_platform.is_cuda() and _may_break(vllm_config) and (graphs is None or _is_piecewise(graphs)):
        os.environ[BREAKABLE] = "1"
        _Ours.is_set = True
        # With another mode vLLM would remove piecewise graphs, because it has read the variable before it called us.
        # set_breakable_mode changes the mode when the model is built.
        compilation.mode = CompilationMode.VLLM_COMPILE
        if graphs is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        _capture_longer_prefills(vllm_config)
    elif graphs is not None and _is_piecewise(graphs):
        return
    else:
        compilation.mode = CompilationMode.NONE
        if graphs is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    logger.info(
        "--model-impl atom: not compiled, CUDA graphs %s. Compile with -cc.mode=3; choose graphs with "
        "-cc.cudagraph_mode=NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE; with %s=0 prefills are "
        "captured only if compiled.",
        compilation.cudagraph_mode.name,
        BREAKABLE,
    )


def _by_our_variable(vllm_config: VllmConfig) -> bool:
    """Whether vLLM set the compilation mode by our variable, which an engine before in this process has left set.

    A configuration that this hook has been through has sizes.
    """
    compilation = vllm_config.compilation_config
    is_none = compilation.mode == CompilationMode.NONE and not vllm_config.model_config.enforce_eager
    return _Ours.is_set and is_none and compilation.cudagraph_capture_sizes is None


def _capture_longer_prefills(vllm_config: VllmConfig) -> None:
    """Set the capture sizes to vLLM's own and :data:`LONGER`, unless the user has set sizes.

    With speculation, whose sizes depend on the tokens of each request, and in other performance modes vLLM sets them.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    is_set = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
    if is_set or vllm_config.speculative_config is not None or vllm_config.performance_mode != "balanced":
        return
    most = scheduler.max_num_batched_tokens
    usual = min(2 * scheduler.max_num_seqs, _MAX_VLLM_SIZE, most)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, usual + 1, 16)}
    # The largest batch in tokens and in requests, if small enough.
    sizes = {size for size in (*sizes, most, scheduler.max_num_seqs) if size <= usual}
    compilation.cudagraph_capture_sizes = sorted(sizes | {size for size in LONGER if size <= most})


def set_breakable_mode(vllm_config: VllmConfig) -> None:
    """Set the compilation mode that breakable graphs need; called when a model is built."""
    if os.environ.get(BREAKABLE) == "1":
        vllm_config.compilation_config.mode = CompilationMode.NONE


def restore_graph_defaults(vllm_config: VllmConfig) -> None:
    """Restore vLLM's defaults for a model of vLLM's own that follows one of ours in the same process."""
    if _Ours.is_set:
        _Ours.is_set = False
        del os.environ[BREAKABLE]
        if not vllm_config.model_config.enforce_eager:
            vllm_config.compilation_config.mode = None


def _is_piecewise(graphs: CUDAGraphMode) -> bool:
    return bool(graphs.requires_piecewise_compilation())


def _may_break(vllm_config: VllmConfig) -> bool:
    """Whether graphs can be breakable: only if all attention is ours.

    vLLM's own attention reads the variable on import, which may be over. Pipeline and data parallelism are untested.
    """
    if BREAKABLE in os.environ and not _Ours.is_set:
        return False
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or vllm_config.parallel_config.data_parallel_size > 1:
        return False
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and speculative.method == "draft_model"
    return not drafts and not load_settings().disable_vllm_attention
