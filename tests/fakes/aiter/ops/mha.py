"""Prefill over pages by CK."""

from itertools import pairwise

import torch
from aiter import _paged
from aiter._recorded import real


@real("aiter.mha_batch_prefill_func")
def mha_batch_prefill_func(
    q,
    k,
    v,
    cu_seqlens_q,
    kv_indptr,
    kv_page_indices,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    out=None,
    kv_last_page_lens=None,
    block_table=None,
    seqlen_k=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    kv_block_descale=None,
    sink_ptr=None,
    sink_size=0,
):
    assert (dropout_p, alibi_slopes, return_lse, return_attn_probs) == (0.0, None, False, False)
    assert (q_descale, k_descale, v_descale, kv_block_descale) == (None, None, None, None)
    assert (sink_ptr, sink_size) == (None, 0), "what it does with sinks is not known"
    assert causal
    assert out is not None
    assert q.dtype == k.dtype == v.dtype == out.dtype, "one dtype"
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] in (128, 256), "sizes of heads that aiter tests"
    requests = len(cu_seqlens_q) - 1
    assert cu_seqlens_q.is_contiguous()
    assert kv_indptr.is_contiguous()
    assert kv_indptr.shape == (requests + 1,)
    assert kv_page_indices.stride(-1) == 1
    assert (kv_last_page_lens, block_table is None, seqlen_k is None) == (None, False, False), "the table's form alone"
    assert block_table.shape[0] == seqlen_k.shape[0] == requests
    assert block_table.stride(-1) == 1
    shuffled = k.dim() == 5
    if not shuffled:
        assert k.dim() == v.dim() == 4
        for side in (k, v):
            _, tokens, heads, dim = side.shape
            assert side.stride(3) == 1
            assert side.stride(2) >= dim
            assert side.stride(1) >= heads * side.stride(2)
            assert side.stride(0) >= tokens * side.stride(1)
            assert all(stride % 8 == 0 for stride in side.stride()[:3])
    page_size = k.shape[3] if shuffled else k.shape[1]
    left, right = window_size
    # "Causal" alone is a window without a left end; one that sees as many keys as there are is none.
    if left >= max_seqlen_k:
        left = -1
    assert right in (-1, 0)
    assert left != 0, "a window of one token: what the real one does with it is not known"
    assert max_seqlen_q >= int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()), "rows past it are not computed"
    assert max_seqlen_k >= int(seqlen_k.max())
    for request in range(requests):
        begin, end = cu_seqlens_q[request : request + 2].tolist()
        if end == begin:
            continue
        length = int(seqlen_k[request])
        pages = _paged.pages_of(block_table, request, length, page_size)
        read_k, read_v = (_paged.shuffled_keys, _paged.shuffled_values) if shuffled else (_paged.plain_pages,) * 2
        keys, values = read_k(k, pages)[:length], read_v(v, pages)[:length]
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        window = None if left < 0 else left + 1
        out[begin:end] = _paged.attend(q[begin:end], keys, values, scale, window=window, soft_cap=logits_soft_cap).to(
            out.dtype
        )
    return out


@real("aiter.flash_attn_varlen_func")
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    min_seqlen_q=0,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1, 0),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    how_v3_bf16_cvt=1,
    block_table=None,
    out=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None,
    sink_ptr=None,
):
    assert (min_seqlen_q, dropout_p, logits_soft_cap, window_size) == (0, 0.0, 0.0, (-1, -1, 0))
    assert (deterministic, return_attn_probs, how_v3_bf16_cvt) == (False, False, 1)
    unused = (bias, alibi_slopes, block_table, out, cu_seqlens_q_padded, cu_seqlens_k_padded, sink_ptr)
    assert all(it is None for it in unused)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (192, 192, 128), "kernels in assembly are for these"
    assert q.shape[1] % k.shape[1] == 0
    assert all(it.is_contiguous() for it in (q, k, v, cu_seqlens_q, cu_seqlens_k))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    query_starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert len(query_starts) == len(key_starts)
    assert (query_starts[-1], key_starts[-1]) == (len(q), len(k))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    found = torch.full((*q.shape[:2], v.shape[-1]), float("nan"))
    logarithms = torch.full((q.shape[1], len(q)), float("nan"))
    repeats = q.shape[1] // k.shape[1]
    for request, (first, last) in enumerate(pairwise(query_starts)):
        begin, end = key_starts[request : request + 2]
        # A launch has tiles for so many.
        count, length = min(last - first, max_seqlen_q), min(end - begin, max_seqlen_k)
        keys, values = (it[begin : begin + length].float().repeat_interleave(repeats, 1) for it in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count].float(), keys) * scale
        if causal:
            unseen = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
            scores = scores.masked_fill(unseen, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(nan=0.0)
        found[first : first + count] = torch.einsum("hqk,khd->qhd", weights, values)
        logarithms[:, first : first + count] = scores.logsumexp(-1)
    return (found.to(q.dtype), logarithms) if return_lse else found.to(q.dtype)
