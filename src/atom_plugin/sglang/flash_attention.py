"""FlashAttention 3 by the binding that SGLang's kernel package has for Hopper.

:mod:`atom_core.kernels.attention.long_prompts` says which batches it runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import cast

import torch

from atom_core.batch import Batch
from atom_core.kernels.attention import PagedAttentionSpec
from atom_core.kernels.attention.flash_attention_3 import FlashAttention3


def why_not_here() -> str | None:
    """None where SGLang's binding says that FlashAttention 3 runs on this machine, else the reason."""
    interface = _interface()
    if isinstance(interface, str):
        return interface
    return None if interface.is_fa3_supported() else "SGLang's kernel package has no FlashAttention 3 for this machine."


def _interface() -> ModuleType | str:
    """SGLang's binding, or why there is none."""
    try:
        from sgl_kernel import flash_attn
    except ImportError as error:
        return f"SGLang's FlashAttention 3 cannot be imported: {error}"
    return cast(ModuleType, flash_attn)


class SglangFlashAttention3(FlashAttention3):
    """See the base class."""

    def __init__(self, spec: PagedAttentionSpec) -> None:
        super().__init__(spec)
        interface = _interface()
        assert isinstance(interface, ModuleType), interface
        self.function = interface.flash_attn_with_kvcache

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """See the base class."""
        self.function(
            q=q,
            k_cache=keys,
            v_cache=values,
            out=out,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_start_loc,
            cache_seqlens=batch.seq_lens,
            softmax_scale=self.scale,
            causal=batch.causal,
            window_size=self.window,
            softcap=self.soft_cap,
            page_table=batch.pages.table,
            sinks=sinks,
            num_splits=self.num_splits,
        )
