"""Attention over pages in Triton: any batch, plain or shuffled pages."""

import torch
from aiter import _paged, dtypes
from aiter._recorded import real


@real("aiter.ops.triton.attention.unified_attention.unified_attention")
def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    q_scales=None,
    alibi_slopes=None,
    output_scale=None,
    qq_bias=None,
    sinks=None,
    shuffled_kv_cache=False,
    skip_reduce=False,
):
    assert causal, "Only causal attention is supported"
    assert (q_descale, q_scales, alibi_slopes, output_scale, qq_bias, skip_reduce) == (
        None,
        None,
        None,
        None,
        None,
        False,
    )
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert k.dtype == v.dtype
    assert k.dtype in (q.dtype, dtypes.fp8), f"neither {q.dtype} nor this GPU's FP8"
    assert k.dim() == v.dim() == (5 if shuffled_kv_cache else 4)
    assert q.stride(-1) == out.stride(-1) == 1
    page_size = k.shape[3] if shuffled_kv_cache else k.shape[1]
    assert page_size >= 16, "a tile of keys is a page, and matrix cores want 16"
    assert page_size & (page_size - 1) == 0
    for scale in (k_descale, v_descale):
        assert scale is None or (scale.dtype == torch.float32 and scale.numel() == 1)
    # The first number is multiplied by, whatever the cache's dtype.
    k_scale, v_scale = (1.0 if scale is None else scale.item() for scale in (k_descale, v_descale))
    window = 1 + window_size[0]
    read_k, read_v = (_paged.shuffled_keys, _paged.shuffled_values) if shuffled_kv_cache else (_paged.plain_pages,) * 2
    assert max_seqlen_k >= int(seqused_k.max())
    for request, length in enumerate(seqused_k.tolist()):
        # With one token each, row i is request i's, and where they begin is not looked at.
        begin, end = (request, request + 1) if max_seqlen_q == 1 else cu_seqlens_q[request : request + 2].tolist()
        assert end <= out.shape[0], "written past the end of the result"
        assert max_seqlen_q == 1 or end - begin <= max_seqlen_q
        if end == begin:
            continue
        if not length:
            out[begin:end] = 0
            continue
        pages = _paged.pages_of(block_table, request, length, page_size)
        keys, values = read_k(k, pages)[:length] * k_scale, read_v(v, pages)[:length] * v_scale
        out[begin:end] = _paged.attend(
            q[begin:end], keys, values, softmax_scale, window=window or None, soft_cap=softcap, sinks=sinks
        ).to(out.dtype)
