"""How our models run on a GPU where the user does not say: uncompiled, decode in full graphs, prefill outside of them.

Our kernels are fused by hand, so a compiler has little left to do and takes most of a start; and graphs of mixed
batches would run a decode with the launches of a prefill.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.config.vllm import OptimizationLevel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.atom_plugin")

#: vLLM's own, so it cannot be told from one that the user gave.
_DEFAULT_LEVEL = OptimizationLevel.O2


def set_graph_defaults(vllm_config: VllmConfig) -> None:
    """Fill in the compilation and graph modes that the user left open; vLLM has not done so yet when this is called.

    Stated modes stand, and so does another optimization level than vLLM's default. ``--enforce-eager``, breakable
    graphs and ``TORCH_COMPILE_DISABLE`` have set the compilation mode by now. A graph mode that cannot do without the
    compiler leaves that mode to vLLM, which compiles.
    """
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if compilation.mode is not None or vllm_config.optimization_level != _DEFAULT_LEVEL:
        return
    if not current_platform.is_cuda_alike():
        return
    graphs = compilation.cudagraph_mode
    if graphs is not None and graphs.requires_piecewise_compilation():
        return
    compilation.mode = CompilationMode.NONE
    if graphs is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    logger.info(
        "--model-impl atom: not compiled, CUDA graphs %s. Compile with -cc.mode=3; choose graphs with "
        "-cc.cudagraph_mode=NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.",
        compilation.cudagraph_mode.name,
    )
