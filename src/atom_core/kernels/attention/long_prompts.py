"""Two kernels over the same pages: FlashAttention 3 for long prompts, ours for all other batches.

FlashAttention 3 prefills faster than our kernel: on an H200, vLLM's build of it takes 170 us for a layer of Qwen3 8B
and eight prompts of 1,024 tokens, ours 240; 866 and 1,469 for one of 8,192; 340 and 399 for 200 requests that decode
beside a chunk of 1,024. But a call takes the host some 0.1 ms longer, which a step of few tokens waits for, and prompts
of a few hundred tokens take our kernel less. Steps without a prompt stay with ours, which fuses norms, rope and the
cache write with attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from atom_core.batch import Batch, BatchShape
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.attention import (
    TRITON_AND_FLASH_ATTENTION_3,
    TRITON_ATTENTION,
    PagedAttentionKernel,
    PagedAttentionSpec,
)
from atom_core.kernels.attention.flash_attention_3 import why_no_flash_attention_3
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.select import Implementation, Target
from atom_core.kernels.triton_support import cdiv
from atom_core.types import GraphSupport

#: FlashAttention 3 runs batches in which some request has at least so many new tokens.
LONG_PROMPT = 4000
#: It also runs those of a layer without a window in which some request has at least so many, with heads of 128 and more
#: or with smaller ones, if the batch has enough tokens for the GPU to take longer than the host: a layer's products
#: grow with tokens x (heads x head size)^2, and 1,024 tokens of 32 heads of 128 are enough.
MIN_PROMPT, MIN_PROMPT_OF_SMALL_HEADS = 512, 2048
MIN_WORK = 1024 * (32 * 128) ** 2


def triton_and_flash_attention_3(
    why_not_here: Callable[[], str | None], flash_attention: Callable[[PagedAttentionSpec], PagedAttentionKernel]
) -> Implementation[PagedAttentionSpec, PagedAttentionKernel]:
    """The implementation that an adapter contributes.

    Args:
        why_not_here: gives None where the framework's binding runs on this machine, else the reason.
        flash_attention: makes the kernel that calls this binding.
    """

    def supports(spec: PagedAttentionSpec, target: Target) -> str | None:
        return TRITON_ATTENTION.supports(spec, target) or why_no_flash_attention_3(spec, target) or why_not_here()

    def build(spec: PagedAttentionSpec, target: Target) -> PagedAttentionKernel:
        return DispatchByPrompts(spec, TRITON_ATTENTION.build(spec, target), flash_attention(spec))

    return Implementation(TRITON_AND_FLASH_ATTENTION_3, supports, build)


class DispatchByPrompts:
    """Two kernels over the same cache: ``long`` runs batches with long prompts, see :data:`LONG_PROMPT`.

    It goes by the batch's ``max_query_len``, which the host knows; in a captured graph it bounds that of each replay.
    """

    order: CacheOrder = "plain"

    def __init__(self, spec: PagedAttentionSpec, kernel: PagedAttentionKernel, long: PagedAttentionKernel) -> None:
        assert kernel.order == long.order == self.order
        assert long.plan_key() is None, "a plan is made before the kernel is chosen"
        self.kernel, self.long = kernel, long
        self.graph_support: GraphSupport = kernel.graph_support
        few = MIN_PROMPT if spec.head_dim >= 128 else MIN_PROMPT_OF_SMALL_HEADS
        self.min_prompt = few if spec.window is None else LONG_PROMPT
        self.min_tokens = cdiv(MIN_WORK, (spec.num_heads * spec.head_dim) ** 2)

    def chosen(self, batch: Batch | BatchShape) -> PagedAttentionKernel:
        """The kernel that runs a batch."""
        longest = batch.max_query_len
        enough = longest >= self.min_prompt and batch.num_tokens >= self.min_tokens
        return self.long if longest >= LONG_PROMPT or enough else self.kernel

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        return attention_keys(self.chosen(shape), shape, device)

    def plan_key(self) -> Hashable | None:
        """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""
        return self.kernel.plan_key()

    def plan(self, batch: Batch) -> object:
        """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""
        return self.kernel.plan(batch)

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        self.chosen(batch)(q, cache, batch, sinks, out)
