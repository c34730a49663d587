"""Selection of aiter's attention kernel for a batch, with the reasons against each kernel and its window argument.

A window of ``W`` tokens has the meaning of HuggingFace's configs: the query's own token and the ``W - 1`` before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from atom_core.cache import SHUFFLED, CacheOrder
from atom_core.kernels.attention import PagedAttentionSpec

PA_FWD_ASM = "pa_fwd_asm"
PA_PERSISTENT = "pa_persistent_fwd"
PA_DECODE_GLUON = "pa_decode_gluon"
UNIFIED_ATTENTION = "unified_attention"
MHA_BATCH_PREFILL = "mha_batch_prefill"

#: Page sizes, in tokens, of ``pa_persistent_fwd``.
PERSISTENT_PAGES = (1024, 256)
E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

Reasons = Iterator[tuple[bool, str]]


@dataclass(frozen=True)
class Call:
    """What the selection depends on: the layer, its cache's order, and batch properties that a graph fixes."""

    spec: PagedAttentionSpec
    order: CacheOrder
    page_size: int
    query_len: int
    """Query tokens of each request if ``uniform``, else the maximum."""
    uniform: bool
    """All requests have equally many query tokens."""
    by_token: bool = True
    """The heads of a token are contiguous in a plain cache, and the tokens of a page follow one another."""

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.spec.num_heads // self.spec.num_kv_heads


def inclusive_window(window: int | None) -> tuple[int, int]:
    """(keys before the query, after it) for unified_attention and mha_batch_prefill; -1 is no limit."""
    return (-1, -1) if window is None else (window - 1, 0)


def gluon_window(window: int | None, query_len: int) -> int:
    """For pa_decode_gluon, which subtracts the number of new tokens from the window; 0 is no window."""
    return 0 if window is None else window + query_len


def _pa_fwd_asm(call: Call) -> Reasons:
    spec = call.spec
    yield call.order != SHUFFLED, "It reads shuffled pages."
    yield call.page_size != 16, f"It has pages of 16 tokens, not {call.page_size}."
    yield spec.head_dim != 128, f"It has head size 128, not {spec.head_dim}."
    yield not math.isclose(spec.scale, 128**-0.5, rel_tol=1e-6), f"Its scale is 1/sqrt(128), not {spec.scale:.4g}."
    yield spec.dtype != torch.bfloat16, f"Its queries are bfloat16 here, not {spec.dtype}."
    yield (
        spec.cache_dtype != spec.dtype,
        f"It has a scale for each token of an FP8 cache; ours has one scale, {spec.cache_dtype}.",
    )
    yield spec.window is not None, "It has no window."
    yield bool(spec.soft_cap), "It has no soft cap."
    yield spec.sinks, "It has no sinks."
    yield call.group > 16, f"It has up to 16 query heads a group, not {call.group}."
    yield not call.uniform, "Requests have different numbers of tokens."
    yield (
        call.query_len > 1 and (call.group != 8 or call.query_len > 2),
        f"Of several tokens a request it takes two, of 8 query heads a group, not {call.query_len} of {call.group}.",
    )


def _pa_persistent(call: Call) -> Reasons:
    spec, rows = call.spec, call.group * call.query_len
    yield call.order != SHUFFLED, "It reads shuffled pages."
    yield call.page_size not in PERSISTENT_PAGES, f"It has pages of 256 and of 1024 tokens, not {call.page_size}."
    yield spec.cache_dtype not in E4M3, f"It has caches in e4m3, not in {spec.cache_dtype}."
    yield spec.head_dim != 128, f"It has head size 128, not {spec.head_dim}."
    yield not math.isclose(spec.scale, 128**-0.5, rel_tol=1e-6), f"Its scale is 1/sqrt(128), not {spec.scale:.4g}."
    yield spec.dtype != torch.bfloat16, f"Its queries are bfloat16, not {spec.dtype}."
    yield spec.window is not None, "It has no window."
    yield bool(spec.soft_cap), "It has no soft cap."
    yield spec.sinks, "It has no sinks."
    yield not call.uniform, "Requests have different numbers of tokens."
    yield rows > 64, f"It takes up to 64 rows (tokens times heads of a group) a request, not {rows}."
    yield (
        16 % spec.num_kv_heads != 0,
        f"It divides the GPU's compute units among 1, 2, 4, 8 or 16 key/value heads, not {spec.num_kv_heads}.",
    )


def _pa_decode_gluon(call: Call) -> Reasons:
    spec, rows = call.spec, call.group * call.query_len
    yield call.order != SHUFFLED, "It reads shuffled pages."
    yield call.page_size not in (16, 64, 1024), f"It has pages of 16, 64 and 1024 tokens, not {call.page_size}."
    yield spec.head_dim not in (64, 128), f"It is known to be right for head sizes 64 and 128, not {spec.head_dim}."
    yield bool(spec.soft_cap), "It has no soft cap."
    yield not call.uniform, "Requests have different numbers of tokens."
    yield call.query_len > 4, f"It takes up to 4 tokens a request, not {call.query_len}."
    yield rows > 64, f"It takes up to 64 rows (tokens times heads of a group) a request, not {rows}."
    yield spec.window is not None and call.page_size == 1024, "It has no window over pages of 1024 tokens."


def _mha_batch_prefill(call: Call) -> Reasons:
    spec = call.spec
    yield call.query_len == 1, "It is for prompts."
    yield spec.head_dim not in (128, 256), f"It is known to be right for head sizes 128 and 256, not {spec.head_dim}."
    yield call.page_size not in (1, 16, 1024), f"It is known for pages of 1, 16 and 1024 tokens, not {call.page_size}."
    yield spec.cache_dtype != spec.dtype, f"Its cache has the queries' dtype, not {spec.cache_dtype}."
    yield spec.sinks, "Its results with sinks are not known."
    yield spec.window == 1, "It ignores a window of one token."
    yield not call.by_token, "It reads plain pages token by token."


def _unified_attention(call: Call) -> Reasons:
    yield call.page_size < 16, f"It takes pages of 16 tokens or more, not {call.page_size}."
    yield call.page_size & (call.page_size - 1) != 0, f"It takes pages of a power of two, not {call.page_size} tokens."


DECODE: tuple[tuple[str, Callable[[Call], Reasons]], ...] = (
    (PA_FWD_ASM, _pa_fwd_asm),
    (PA_PERSISTENT, _pa_persistent),
    (PA_DECODE_GLUON, _pa_decode_gluon),
    (UNIFIED_ATTENTION, _unified_attention),
)
PREFILL: tuple[tuple[str, Callable[[Call], Reasons]], ...] = (
    (MHA_BATCH_PREFILL, _mha_batch_prefill),
    (UNIFIED_ATTENTION, _unified_attention),
)


@dataclass(frozen=True)
class Choice:
    """The kernel for a batch, and why the kernels before it cannot run it."""

    kernel: str
    passed_over: tuple[tuple[str, str], ...]


def choose(call: Call) -> Choice:
    """The first kernel that can run it, from the decode kernels if all requests have equally many, few tokens.

    Raises:
        ValueError: no kernel can.
    """
    passed_over: list[tuple[str, str]] = []
    # Decoding requests have one token, or up to four with speculative decoding.
    for name, reasons in DECODE if call.uniform and call.query_len <= 4 else PREFILL:
        reason = next((reason for applies, reason in reasons(call) if applies), None)
        if reason is None:
            return Choice(name, tuple(passed_over))
        passed_over.append((name, reason))
    said = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise ValueError(
        f"No attention kernel of aiter's takes this batch. {said} Set ATOM_KERNELS=attention=triton, or ATOM_AITER=0."
    )
