"""Decode attention in assembly: heads of 128 numbers, whose scale is built in, over shuffled pages."""

import os

import torch
from aiter import _paged, dtypes
from aiter._recorded import real
from aiter._shared_out import join
from aiter.ops.enum import QuantType

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


#: Tokens of a page, and what has one scale, of the kernels over caches in FP8.
_PERSISTENT = {(256, "per_256x128"), (1024, "per_1024x128")}


@real("aiter.pa_persistent_fwd")
def pa_persistent_fwd(
    Q,
    K,
    V,
    output,
    max_qlen,
    qo_indptr,
    kv_indptr,
    kv_indices,
    context_lens,
    work_indptr,
    work_info,
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    K_QScale=None,
    V_QScale=None,
    softmax_scale=None,
    mask=0,
    quant_type=QuantType.per_Token,
):
    assert os.environ["GPU_ARCHS"] in ("gfx942", "gfx950")
    (tokens, heads, dim), (blocks, kv_heads, _, page_size, _) = Q.shape, K.shape
    group = heads // kv_heads
    assert dim == 128, "only heads of 128 numbers"
    assert Q.dtype == output.dtype == torch.bfloat16
    assert K.dtype == V.dtype == dtypes.fp8, "only caches in FP8"
    assert (page_size, quant_type.name) in _PERSISTENT, "no kernel"
    assert mask == 1, "no kernel without"
    assert softmax_scale is None, "nobody looks at it"
    assert group * max_qlen <= 64
    assert K.stride(0) == V.stride(0)
    assert K.stride(1) == V.stride(1), "values are gone through by the keys' strides"
    assert K_QScale.shape == V_QScale.shape == (blocks, kv_heads)
    assert K_QScale.dtype == V_QScale.dtype == torch.float32
    assert K_QScale.stride() == V_QScale.stride(), "values' scales are gone through by the keys' strides"
    assert output.is_contiguous()
    assert output.shape == Q.shape
    assert len(qo_indptr) == len(kv_indptr) == len(context_lens) + 1

    rows = len(reduce_partial_map) * max_qlen
    parts = torch.full((rows, 1, heads, dim), float("nan"))
    logarithms = torch.full((rows, heads), float("nan"))
    starts, firsts, lengths = qo_indptr.tolist(), kv_indptr.tolist(), context_lens.tolist()
    bounds = work_indptr.tolist()
    for unit in range(len(bounds) - 1):
        for request, place, first, last, begin, end, _, range_ in work_info[bounds[unit] : bounds[unit + 1]].tolist():
            # Rows are those that equally many tokens of each request have; those of padded requests mean nothing.
            assert last - first == max_qlen
            assert 0 <= first < last <= tokens
            assert 0 <= request < len(lengths)
            assert 0 <= begin <= end <= len(kv_indices), "numbers that nobody has written"
            assert first == starts[request] or not lengths[request], "rows of another request"
            head, past = range_ & 0xFFFF, range_ >> 16
            pages, of = kv_indices[begin:end].long(), head // group
            keys = _paged.shuffled_keys(K, pages)[:, of].unflatten(0, (-1, page_size)) * K_QScale[pages, of, None, None]
            values = _paged.shuffled_values(V, pages)[:, of].unflatten(0, (-1, page_size))
            values = values * V_QScale[pages, of, None, None]
            at = (begin - firsts[request]) * page_size + torch.arange(len(pages) * page_size)
            # The last query sees the last key, and each query before it a key less.
            seen = at < (lengths[request] - (last - 1 - torch.arange(first, last)))[:, None]
            found = torch.where(seen[-1, :, None], keys.flatten(0, 1), 0.0)
            scores = torch.einsum("qhd,kd->qhk", Q[first:last, head:past].float(), found) * 128**-0.5
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
            logarithm = scores.logsumexp(-1)
            weights = (scores - logarithm[..., None]).exp().nan_to_num(0.0)
            answer = torch.einsum("qhk,kd->qhd", weights, torch.where(seen[-1, :, None], values.flatten(0, 1), 0.0))
            if place < 0:
                answer[logarithm == float("-inf")] = float("nan")  # a sum of no weights
                output[first:last, head:past] = answer.to(output.dtype)
            else:
                parts[place : place + last - first, 0, head:past] = answer
                logarithms[place : place + last - first, head:past] = logarithm
    join(parts, logarithms, reduce_indptr, reduce_final_map, reduce_partial_map, output)
    return parts, logarithms.new_zeros(tokens, heads)
