"""vLLM's own kernels, called as its models call them, for comparison.

Each function returns a call or raises :class:`Unavailable`. Only this module and
:mod:`atom_plugin.bench.vllm_delta_kernels` import vLLM, when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from atom_core.quant.fp8 import BLOCK_SIZE

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights

#: vLLM 0.32's default maximum of KV splits in decoding graphs.
_SPLITS_IN_GRAPHS = 32


class Unavailable(Exception):
    """A contender that cannot run here; the message says why."""


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Turn any failure to import into :class:`Unavailable`: a wheel for another device fails in many ways."""
    try:
        yield
    except Exception as error:
        raise Unavailable(f"{what} cannot be imported: {error}") from error


def leave_out_other_gpus(reason: str) -> None:
    """Raise :class:`Unavailable` with ``reason`` on a GPU that is not a Hopper."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        raise Unavailable(reason)


def add_and_rms_norm() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """``(x, residual, weight, eps)``; writes to x and residual in place."""
    ops = _ops()

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ops.fused_add_rms_norm(x, residual, weight, eps)
        return x

    return run


def silu_and_mul() -> Callable[[torch.Tensor], torch.Tensor]:
    """``[T, 2N]`` to ``[T, N]``."""
    _ops()

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, x)
        return out

    return run


def qk_norm_rope_cache() -> Callable[..., torch.Tensor]:
    """``(qkv, positions, weights, cache, slots, spec)`` to q: one kernel each for norms, rope and the cache write.

    ``cache`` is ``[2, pages, page size, K, D]``. q and k are rotated in place.
    """
    ops = _ops()
    # The scale of an unquantised cache; allocated outside any graph.
    one = torch.ones(1, device="cuda")

    def run(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: torch.Tensor,
        slots: torch.Tensor,
        spec: QkvSpec,
    ) -> torch.Tensor:
        D = spec.head_dim
        q, k, v = torch.split(qkv, [spec.num_heads * D, spec.num_kv_heads * D, spec.num_kv_heads * D], -1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = (_head_norm(ops, x, D, norm, weights.eps) for x, norm in ((q, weights.q_norm), (k, weights.k_norm)))
        ops.rotary_embedding(positions, q, k, D, weights.cos_sin, not spec.interleaved)
        heads = (len(qkv), spec.num_kv_heads, D)
        ops.reshape_and_cache_flash(k.view(heads), v.view(heads), cache[0], cache[1], slots, "auto", one, one)
        rotated: torch.Tensor = q.reshape(len(qkv), spec.num_heads, D)
        return rotated

    return run


def flash_attention_3(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    longest: int | None = None,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """``(q, keys, values, out)`` over pages ``[pages, page size, K, D]``; scheduled once, as in a model's step.

    Args:
        max_seq_len: what a graph is captured for.
        dtype: of queries, keys and values; in FP8 their scales are 1.
        longest: tokens of the longest request, with which replays of a graph are scheduled; None: ``max_seq_len``.
    """
    interface = _flash_attention_interface()
    if dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        raise Unavailable(f"FlashAttention 3 has queries, keys and values in bfloat16, float16 or e4m3, not in {dtype}")
    splits = _SPLITS_IN_GRAPHS if max_query_len == 1 else 0
    schedule = interface.get_scheduler_metadata(
        batch_size=len(seq_lens),
        max_seqlen_q=max_query_len,
        max_seqlen_k=longest or max_seq_len,
        num_heads_q=num_heads,
        num_heads_kv=num_kv_heads,
        headdim=head_dim,
        cache_seqlens=seq_lens,
        qkv_dtype=dtype,
        cu_seqlens_q=query_start_loc,
        page_size=page_size,
        causal=True,
        num_splits=splits,
    )
    scales: dict[str, torch.Tensor] = {}
    if dtype.itemsize == 1:
        one = torch.ones(1, device=seq_lens.device).expand(len(seq_lens), num_kv_heads)
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}

    def run(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        interface.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=out,
            max_seqlen_q=max_query_len,
            cu_seqlens_q=query_start_loc,
            max_seqlen_k=max_seq_len,
            seqused_k=seq_lens,
            softmax_scale=head_dim**-0.5,
            causal=True,
            block_table=page_table,
            scheduler_metadata=schedule,
            num_splits=splits,
            fa_version=3,
            **scales,
        )
        return out

    return run


def flash_attention_3_of_latents(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seq_len: int,
    num_heads: int,
    rank: int,
    rope_dim: int,
    page_size: int,
    scale: float,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    longest: int | None = None,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``(q [R, H, L + R'], pages [pages, page size, L + R'])`` to ``[R, H, L]``, one query token a request.

    Args:
        max_seq_len, longest: see :func:`flash_attention_3`.
        cache_dtype: None: ``dtype``.
    """
    interface = _flash_attention_interface()
    if cache_dtype not in (None, dtype):
        raise Unavailable(f"vLLM's FlashAttention for latents has a cache in the model's dtype, not in {cache_dtype}")
    schedule = interface.get_scheduler_metadata(
        batch_size=len(seq_lens),
        max_seqlen_q=1,
        max_seqlen_k=longest or max_seq_len,
        num_heads_q=num_heads,
        num_heads_kv=1,
        headdim=rope_dim,
        cache_seqlens=seq_lens,
        qkv_dtype=dtype,
        headdim_v=rank,
        cu_seqlens_q=query_start_loc,
        page_size=page_size,
        causal=True,
        num_splits=_SPLITS_IN_GRAPHS,
    )

    def run(q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        rows = pages.unsqueeze(2)
        attended: torch.Tensor = interface.flash_attn_varlen_func(
            q=q[..., rank:],
            k=rows[..., rank:],
            v=rows[..., :rank],
            q_v=q[..., :rank],
            max_seqlen_q=1,
            cu_seqlens_q=query_start_loc,
            max_seqlen_k=max_seq_len,
            seqused_k=seq_lens,
            softmax_scale=scale,
            causal=True,
            block_table=page_table,
            scheduler_metadata=schedule,
            num_splits=_SPLITS_IN_GRAPHS,
            fa_version=3,
        )
        return attended

    return run


#: Tokens of a page that FlashMLA reads.
FLASH_MLA_PAGE = 64


def flash_mla(
    *,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    num_heads: int,
    rank: int,
    scale: float,
    page_size: int = FLASH_MLA_PAGE,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """As :func:`flash_attention_3_of_latents`, over pages of 64 rows; scheduled once, as in a model's step.

    Queries have the cache's dtype; in FP8 their scales are 1.
    """
    with importing("vLLM's FlashMLA"):
        from vllm.v1.attention.ops import flashmla
    supported, reason = flashmla.is_flashmla_dense_supported()
    if not supported:
        raise Unavailable(f"FlashMLA cannot run here: {reason}")
    if page_size != FLASH_MLA_PAGE:
        raise Unavailable(f"FlashMLA reads pages of {FLASH_MLA_PAGE} tokens, not of {page_size}")
    if cache_dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        raise Unavailable(f"FlashMLA has a cache in bfloat16, float16 or e4m3, not in {cache_dtype}")
    if cache_dtype.itemsize == 1:
        return _flash_mla_fp8(flashmla, seq_lens, page_table, num_heads, rank, scale)
    schedule, _ = flashmla.get_mla_metadata(seq_lens, num_heads, 1, is_fp8_kvcache=False)

    def run(q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = flashmla.flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=pages.unsqueeze(2),
            block_table=page_table,
            cache_seqlens=seq_lens,
            head_dim_v=rank,
            tile_scheduler_metadata=schedule,
            softmax_scale=scale,
            causal=True,
            is_fp8_kvcache=False,
        )[0]
        return attended.squeeze(1)

    return run


def _flash_mla_fp8(
    flashmla: Any, seq_lens: torch.Tensor, page_table: torch.Tensor, num_heads: int, rank: int, scale: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    schedule, splits = flashmla.get_mla_metadata_dense_fp8(seq_lens, num_heads, 1)
    one = torch.ones(1, device=seq_lens.device)

    def run(q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = flashmla.flash_mla_with_kvcache_fp8(
            q=q.unsqueeze(1),
            k_cache=pages.unsqueeze(2),
            block_table=page_table,
            cache_seqlens=seq_lens,
            head_dim_v=rank,
            tile_scheduler_metadata=schedule,
            num_splits=splits,
            softmax_scale=scale,
            causal=True,
            descale_q=one,
            descale_k=one,
        )[0]
        return attended.squeeze(1)

    return run


#: From how many rows on vLLM 0.30 to 0.33 multiply by DeepGEMM; fewer go to FlashInfer's product.
DEEP_GEMM_ROWS = 32


def fp8_block_linear(
    rows: int, out_features: int, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """``(x [rows, K], weight [N, K], its blocks' scales)`` to ``[rows, N]``, by what vLLM multiplies by on Hopper.

    Scales stay float32. vLLM rounds those of inputs and weights up to powers of two, which it stores as float32 too.
    """
    with importing("vLLM's FP8 products"):
        from vllm.model_executor.layers.quantization.utils import fp8_utils
        from vllm.utils import deep_gemm, flashinfer
    leave_out_other_gpus("vLLM's FP8 products in blocks have other scales on GPUs other than Hopper")
    if dtype != torch.bfloat16 or out_features % 64:
        raise Unavailable(
            f"DeepGEMM has outputs in bfloat16 and in multiples of 64, not {out_features} of them in {dtype}"
        )
    if rows < DEEP_GEMM_ROWS:
        if not flashinfer.is_flashinfer_fp8_blockscale_gemm_supported():
            raise Unavailable("vLLM finds no FP8 product of FlashInfer for this GPU")
        return lambda x, weight, scale: flashinfer.flashinfer_fp8_blockscale_gemm(
            input=x, weight=weight, weight_scale=scale, out_dtype=dtype
        )
    if not deep_gemm.is_deep_gemm_supported():
        raise Unavailable("vLLM finds no DeepGEMM for this GPU")

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        quantized = fp8_utils.per_token_group_quant_fp8(
            x, group_size=BLOCK_SIZE, column_major_scales=True, use_ue8m0=False
        )
        out = x.new_empty(len(x), len(weight))
        deep_gemm.fp8_gemm_nt(quantized, (weight, scale), out, is_deep_gemm_e8m0_used=False)
        return out

    return run


def fused_experts(
    tokens: int,
    experts: int,
    size: int,
    hidden: int,
    top_k: int,
    *,
    tuned: bool,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """``(x, weights, experts, gate_up, down)`` to ``[T, H]``, by vLLM's Triton kernels.

    Args:
        tokens, experts, size, hidden, top_k: the layer's; ``size`` is each expert's intermediate size.
        tuned: with vLLM's tuned configuration for this GPU, else with its default.
        scales: the block scales of FP8 ``gate_up`` and ``down``; None: 16-bit weights.
    """
    with importing("vLLM's fused experts"):
        from vllm.model_executor.layers import fused_moe
        from vllm.model_executor.layers.fused_moe import config
        from vllm.model_executor.layers.fused_moe import fused_moe as kernels
    if not hasattr(torch.ops._moe_C, "moe_align_block_size"):
        raise Unavailable("vLLM is installed without its compiled kernels")
    block = None if scales is None else [BLOCK_SIZE, BLOCK_SIZE]
    dtype = None if scales is None else "fp8_w8a8"
    if tuned and not kernels.get_moe_configs(experts, size, dtype, *(block or (0, 0))):
        raise Unavailable("vLLM has no tuned configuration for these experts on this GPU")
    chosen = None if tuned else kernels.get_default_config(tokens, experts, size, hidden, top_k, dtype, block)
    quant = None if scales is None else config.fp8_w8a8_moe_quant_config(*scales, block_shape=block)

    def run(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        with fused_moe.override_config(chosen):
            y: torch.Tensor = kernels.fused_experts(x, gate_up, down, weights, ids, quant_config=quant)
        return y

    return run


def _flash_attention_interface() -> Any:
    with importing("vLLM's FlashAttention"):
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    if not interface.is_fa_version_supported(3):
        raise Unavailable(f"FlashAttention 3 cannot run here: {interface.fa_version_unsupported_reason(3)}")
    return interface


def _head_norm(ops: Any, x: torch.Tensor, head_dim: int, weight: torch.Tensor, eps: float) -> torch.Tensor:
    heads = torch.unflatten(x, -1, (-1, head_dim))
    out = torch.empty(heads.shape, dtype=x.dtype, device=x.device)
    ops.rms_norm(out, heads, weight, eps)
    return out.flatten(1)


def _ops() -> Any:
    with importing("vLLM's kernels"):
        from vllm import _custom_ops
    if not hasattr(torch.ops._C, "silu_and_mul"):
        raise Unavailable("vLLM is installed without its compiled kernels")
    return _custom_ops
