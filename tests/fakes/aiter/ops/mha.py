"""Prefill over pages by CK."""

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
