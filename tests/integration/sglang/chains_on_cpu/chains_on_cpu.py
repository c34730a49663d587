"""A plug-in for SGLang that gives it speculative decoding on a CPU, for tests: two kernels that it lacks there.

SGLang has both as Triton kernels too, which run in Triton's interpreter (TRITON_INTERPRET=1). A folder with this module
and its metadata on PYTHONPATH is all it takes for SGLang to load it, in all of its processes.
"""

from __future__ import annotations

import inspect
from typing import Any

SPEC_TREE = "sglang.kernels.ops.speculative.spec_tree"


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SPEC_TREE}.build_tree_kernel_efficient_func", _build_tree, HookType.REPLACE)
    HookRegistry.register(f"{SPEC_TREE}.verify_tree_greedy_func", _verify_greedily, HookType.REPLACE)


def _build_tree(*args: Any) -> None:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def _verify_greedily(*args: Any, **named: Any) -> tuple[Any, Any, Any]:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    named.pop("topk", None)
    bound = inspect.signature(verify_tree_greedy_triton).bind(*args, **named).arguments
    verify_tree_greedy_triton(**bound)
    return bound["predicts"], bound["accept_index"], bound["accept_token_num"]
