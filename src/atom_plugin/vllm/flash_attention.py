"""FlashAttention 3 by the binding that vLLM's CUDA build ships for Hopper.

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
    """None where vLLM's binding says that FlashAttention 3 runs on this machine, else the reason."""
    interface = _interface()
    if isinstance(interface, str):
        return interface
    if not interface.is_fa_version_supported(3):
        return f"FlashAttention 3 cannot run here: {interface.fa_version_unsupported_reason(3)}"
    return None


def _interface() -> ModuleType | str:
    """vLLM's binding, or why there is none."""
    try:
        from vllm.vllm_flash_attn import flash_attn_interface
    except ImportError as error:
        return f"vLLM's FlashAttention cannot be imported: {error}"
    return cast(ModuleType, flash_attn_interface)


def binding() -> ModuleType:
    """vLLM's binding; call it where :func:`why_not_here` gives None."""
    interface = _interface()
    assert isinstance(interface, ModuleType), interface
    return interface


class VllmFlashAttention3(FlashAttention3):
    """See the base class."""

    def __init__(self, spec: PagedAttentionSpec) -> None:
        super().__init__(spec)
        self.function = binding().flash_attn_varlen_func

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
            k=keys,
            v=values,
            out=out,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            softmax_scale=self.scale,
            causal=batch.causal,
            window_size=list(self.window),
            softcap=self.soft_cap,
            block_table=batch.pages.table,
            fa_version=3,
            s_aux=sinks,
            num_splits=self.num_splits,
        )
