"""FlashAttention 3 for SGLang, native and ours, whose kernel package has none: vLLM's build of the same kernel.

SGLang's own build is part of a library of 1.1 GB (`sgl_kernel/flash_ops`). vLLM's is a file, `_vllm_fa3_C.abi3.so`,
which the variable :data:`LIBRARY` names. The functions are those of `sgl_kernel.flash_attn` that SGLang's attention
backend and ours call, with the arguments that these use; others are refused.

Launches, pages, splits and schedules are those of the caller: SGLang leaves the number of splits to the kernel (0).
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

logger = logging.getLogger("sglang.flash_attention_3")
LIBRARY = "BENCH_FLASH_ATTENTION_3"

torch.ops.load_library(os.environ[LIBRARY])


def is_fa3_supported(device: torch.device | None = None) -> bool:
    """See SGLang."""
    return torch.cuda.get_device_capability(device)[0] == 9


#: The parameters of SGLang's functions, which some of its modules pass by their places.
OVER_PAGES = (
    *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
    *("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale"),
    *("k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap"),
    *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "only_qv", "sm_margin"),
    *("return_softmax_lse", "sinks", "score_mod", "aux_tensors", "ver", "out"),
)
IN_RANGES = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"),
    *("page_table", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size"),
    *("attention_chunk", "softcap", "num_splits", "pack_gqa", "only_qv", "sm_margin", "return_softmax_lse", "sinks"),
    *("score_mod", "aux_tensors", "ver", "out"),
)


def flash_attn_with_kvcache(*places: Any, **named: Any) -> Any:
    """Attention of ``q [T, H, D]`` over pages ``[P, page, H, D]``; see SGLang, whose backend writes new keys itself."""
    given = {**dict(zip(OVER_PAGES, places, strict=False)), **named}
    _refuse({name: given.pop(name, None) for name in ("k", "v")})
    given.pop("cu_seqlens_k_new", None)  # counts with new keys alone
    given.pop("rotary_interleaved", None)  # and with cosines
    given["num_splits"] = given.get("num_splits") or 0
    given |= {"k": given.pop("k_cache"), "v": given.pop("v_cache"), "seqused_k": given.pop("cache_seqlens")}
    assert isinstance(given["seqused_k"], torch.Tensor)
    return _forward(given)


def flash_attn_varlen_func(*places: Any, **named: Any) -> Any:
    """Attention of ``q [T, H, D]`` to ``k [S, Hk, D]`` and ``v [S, Hk, Dv]``; see SGLang."""
    given = {**dict(zip(IN_RANGES, places, strict=False)), **named}
    return _forward({"num_splits": 1, **given})


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """A step's schedule for all layers; see SGLang."""
    _refuse({"attention_chunk": attention_chunk})
    made: torch.Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads,
        num_heads_k,
        headdim,
        headdim if headdim_v is None else headdim_v,
        qkv_dtype,
        cache_seqlens,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k_new,
        seqused_q,
        leftpad_k,
        page_size,
        max_seqlen_k_new,
        causal,
        *window_size,
        has_softcap,
        num_splits,
        pack_gqa,
        sm_margin,
    )
    return made


#: What arguments that vLLM's kernel does not take may be: of newer extensions of FlashAttention, none is used.
_UNUSED: dict[str, tuple[Any, ...]] = {"ver": (3,), "attention_chunk": (0,), "only_qv": (False,)}


#: Sizes of heads for which the step's schedule does not fit: each layer makes its own, by a small launch.
_SCHEDULED_BY_LAYERS: set[int] = set()


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and (isinstance(value, torch.Tensor) or value not in _UNUSED.get(name, ())):
            raise ValueError(f"FlashAttention 3 of vLLM stands in for SGLang's, and knows no {name}={value!r}.")


def _forward(given: dict[str, Any]) -> Any:
    """Call the op as vLLM's own `flash_attn_varlen_func` does."""
    take = given.pop
    q, qv, scale = take("q"), take("qv", None), take("softmax_scale", None)
    window = take("window_size", (-1, -1))
    with_lse = take("return_softmax_lse", False)
    before = (
        q if q.stride(-1) == 1 else q.contiguous(),
        take("k"),
        take("v"),
        None,  # new keys
        None,  # new values
        qv,
        take("out", None),
        take("cu_seqlens_q"),
        take("cu_seqlens_k", None),
        None,  # of new keys
        take("seqused_q", None),
        take("seqused_k", None),
        take("max_seqlen_q"),
        take("max_seqlen_k", None),
        take("page_table", None),
        None,  # rows of the cache
        None,  # padding on the left
        None,  # cosines
        None,  # sines
        None,  # lengths that are rotated
        take("q_descale", None),
        take("k_descale", None),
        take("v_descale", None),
        (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5 if scale is None else scale,
        take("causal", False),
        *window,
        take("softcap", 0.0),
        True,  # of cosines
    )
    metadata = take("scheduler_metadata", None)
    if q.shape[-1] in _SCHEDULED_BY_LAYERS:
        metadata = None
    behind = (
        take("num_splits"),
        take("pack_gqa", None),
        take("sm_margin", 0),
        take("sinks", None),
        1,  # ranks of context parallelism
        0,
        None,
    )
    _refuse(given)
    try:
        out, lse, *rest = torch.ops._vllm_fa3_C.fwd(*before, metadata, *behind)
    except RuntimeError as error:
        # Seen with heads of 128: the schedule that SGLang asks for has another size there than the kernel expects.
        if metadata is None or "scheduler_metadata" not in str(error):
            raise
        _SCHEDULED_BY_LAYERS.add(q.shape[-1])
        logger.warning("FlashAttention 3 schedules each layer's decode by itself: the step's schedule does not fit it.")
        out, lse, *rest = torch.ops._vllm_fa3_C.fwd(*before, None, *behind)
    return (out, lse, *rest) if with_lse else out
