"""How our models run on a GPU where the user does not say: uncompiled, decode in full graphs, prefill between them.

Our kernels are fused by hand, so a compiler has little left to do and takes most of a start. Graphs of mixed batches
would run a decode with the launches of a prefill, and launching a prefill's kernels one by one takes longer than they
run; so a prefill's are captured between its attention layers, which vLLM calls breakable graphs and does without
torch.compile for models that it cannot compile.
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

#: vLLM's own, so it cannot be told from one that the user gave.
_DEFAULT_LEVEL = OptimizationLevel.O2

#: vLLM's variable for breakable graphs. vLLM sets it for some of its own models: an engine's processes inherit it, and
#: no field of the configuration stands for it (CONTRIBUTING.md, "Exceptions", says when this ends).
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


#: Sizes of prefills, in tokens, for which graphs are captured beyond those that vLLM captures by itself. Up to them a
#: small model's prefill waits for the host outside of graphs: eight prompts of 128 tokens of Qwen3 0.6B have their
#: first tokens after 7.3 ms within, after 16.8 ms outside of one (H200).
LONGER = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
#: Up to how many tokens vLLM captures.
_MOST = 512


class _Ours:
    """Whether the variable is from us, so that it can be taken back for the next engine's model."""

    is_set = False


def set_graph_defaults(vllm_config: VllmConfig) -> None:
    """Fill in the compilation and graph modes that the user left open; vLLM has not done so yet when this is called.

    Stated modes stand, and so does another optimization level than vLLM's default. ``--enforce-eager``, breakable
    graphs and ``TORCH_COMPILE_DISABLE`` have set the compilation mode by now. A graph mode that cannot do without the
    compiler, where graphs cannot break, leaves that mode to vLLM, which compiles.
    """
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if compilation.mode is not None or vllm_config.optimization_level != _DEFAULT_LEVEL:
        return
    if not current_platform.is_cuda_alike():
        return
    graphs = compilation.cudagraph_mode
    if current_platform.is_cuda() and _may_break(vllm_config) and (graphs is None or _is_piecewise(graphs)):
        os.environ[BREAKABLE] = "1"
        _Ours.is_set = True
        # With another mode vLLM takes piecewise graphs away again, having looked for the variable before it asked us.
        # This one lasts until a model of ours is built.
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
        "-cc.cudagraph_mode=NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE; with %s=0 no prefill is "
        "captured that is not compiled.",
        compilation.cudagraph_mode.name,
        BREAKABLE,
    )


def _capture_longer_prefills(vllm_config: VllmConfig) -> None:
    """Fill in the sizes that graphs are captured for: vLLM's, and :data:`LONGER`; sizes that the user stated stand.

    With drafts sizes go by tokens a request, which is left to vLLM, and so are its other performance modes.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    stated = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
    if stated or vllm_config.speculative_config is not None or vllm_config.performance_mode != "balanced":
        return
    most = scheduler.max_num_batched_tokens
    usual = min(2 * scheduler.max_num_seqs, _MOST, most)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, usual + 1, 16)}
    # The largest batches of all, of tokens and of requests, where they are small enough.
    sizes = {size for size in (*sizes, most, scheduler.max_num_seqs) if size <= usual}
    compilation.cudagraph_capture_sizes = sorted(sizes | {size for size in LONGER if size <= most})


def compile_nothing_between_breaks(vllm_config: VllmConfig) -> None:
    """Have the mode that vLLM's own models have where graphs break; to be called where one of ours is built."""
    if os.environ.get(BREAKABLE) == "1":
        vllm_config.compilation_config.mode = CompilationMode.NONE


def take_back_graph_defaults(vllm_config: VllmConfig) -> None:
    """Let a model of vLLM's own, behind one of ours in the same process, have vLLM's defaults."""
    if _Ours.is_set:
        _Ours.is_set = False
        del os.environ[BREAKABLE]
        if not vllm_config.model_config.enforce_eager:
            vllm_config.compilation_config.mode = None


def _is_piecewise(graphs: CUDAGraphMode) -> bool:
    return bool(graphs.requires_piecewise_compilation())


def _may_break(vllm_config: VllmConfig) -> bool:
    """Whether all attention is ours, as vLLM's own may have been imported by now and would not break.

    And not where a step goes through several groups of GPUs (pipelines, replicas), which has not been tried.
    """
    if BREAKABLE in os.environ and not _Ours.is_set:
        return False
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or vllm_config.parallel_config.data_parallel_size > 1:
        return False
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and speculative.method == "draft_model"
    return not drafts and not load_settings().disable_vllm_attention
