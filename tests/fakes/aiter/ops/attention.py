"""Decode attention in assembly: heads of 128 numbers, whose scale is built in, over shuffled pages."""

import os

import torch
from aiter import _paged
from aiter._recorded import real

#: (queries, cache, query heads a group, several tokens) of the kernels there are, of those that are exact.
_GROUPS = {torch.bfloat16: {False: (8, 16), True: (8,)}}


@real("aiter.pa_fwd_asm")
def pa_fwd_asm(
    Q,
    K,
    V,
    block_tables,
    context_lens,
    block_tables_stride0,
    max_qlen=1,
    K_QScale=None,
    V_QScale=None,
    out_=None,
    qo_indptr=None,
    high_precision=1,
    kernelName=None,
):
    assert os.environ["GPU_ARCHS"] in ("gfx942", "gfx950")
    assert kernelName is None
    assert high_precision == 0, "1 takes whichever of several comes first in a map without an order"
    assert Q.shape[-1] == 128, "only heads of 128 numbers"
    assert K.shape[3] == 16, "only pages of 16 tokens here"
    assert Q.dtype == K.dtype == V.dtype, "a cache of another dtype comes with scales, which ours has none of"
    assert (K_QScale, V_QScale) == (None, None)
    assert K.stride(0) == V.stride(0)
    assert K.stride(1) == V.stride(1), "values are gone through by the keys' strides"
    assert block_tables_stride0 == block_tables.stride(0)
    assert context_lens.dtype == torch.int32
    heads, kv_heads = Q.shape[1], K.shape[1]
    several = max_qlen > 1 and qo_indptr is not None
    group = heads // kv_heads
    rounded = (group, -(-group // 8) * 8)
    assert any(it in _GROUPS[Q.dtype][several] for it in rounded), f"no kernel for groups of {group}"
    out = torch.empty_like(Q) if out_ is None else out_
    assert out.is_contiguous()
    batch = block_tables.shape[0] if max_qlen > 1 else context_lens.shape[0]
    for request in range(batch):
        # Without qo_indptr the kernel for one token a request runs, whatever max_qlen says.
        begin, end = qo_indptr[request : request + 2].tolist() if several else (request, request + 1)
        assert end <= Q.shape[0], "a row past the end of the queries"
        assert not several or end - begin == max_qlen, "which keys a row sees is worked out from max_qlen"
        length = int(context_lens[request])
        if not length:
            out[begin:end] = float("nan")  # a sum of no weights
            continue
        pages = _paged.pages_of(block_tables, request, length, 16)
        keys = _paged.shuffled_keys(K, pages)[:length]
        values = _paged.shuffled_values(V, pages)[:length]
        out[begin:end] = _paged.attend(Q[begin:end], keys, values, 128**-0.5).to(out.dtype)
    return out
