"""Decode over latents as it was shared out: each part of a request by itself, and then the sums of parts."""

import os

import torch
from aiter import dtypes
from aiter._recorded import real
from aiter._shared_out import join
from aiter.ops.mla_metadata import folded


@real("aiter.mla.mla_decode_fwd")
def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    page_size=1,
    nhead_kv=1,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
    num_kv_splits_indptr=None,
    work_meta_data=None,
    work_indptr=None,
    work_info_set=None,
    reduce_indptr=None,
    reduce_final_map=None,
    reduce_partial_map=None,
    q_scale=None,
    kv_scale=None,
    intra_batch_mode=False,
    return_logits=False,
    return_lse=False,
    g_kv_indptr=None,
    cp_world_size=1,
    cp_rank=0,
    causal=True,
):
    arch = os.environ["GPU_ARCHS"]
    assert None not in (work_meta_data, num_kv_splits), "without them the keys are shared out otherwise"
    assert (nhead_kv, logit_cap, num_kv_splits_indptr, q_scale, intra_batch_mode) == (1, 0.0, None, None, False)
    assert (return_logits, return_lse, g_kv_indptr, cp_world_size, cp_rank, causal) == (False, False, None, 1, 0, True)
    tokens, heads, width = q.shape
    assert q.dtype == o.dtype == torch.bfloat16
    assert width == kv_buffer.shape[3] == 576
    assert o.shape == (tokens, heads, 512)
    assert q.is_contiguous()
    assert o.is_contiguous()
    assert page_size == kv_buffer.shape[1] == 1, "pages of several tokens are not stood in for"
    assert kv_buffer.stride(0) == width
    assert 1 <= max_seqlen_q <= 4
    if kv_buffer.dtype != torch.bfloat16:
        assert kv_buffer.dtype == dtypes.fp8
        assert heads == 16, "bfloat16 queries meet FP8 keys in a kernel of 16 heads"
        assert kv_scale.shape == (1,)
        assert kv_scale.dtype == torch.float32
    fold = folded(arch, heads, q.dtype, kv_buffer.dtype)
    assert fold == 1 or max_seqlen_q == 1
    assert work_meta_data.tolist() == [work_indptr.data_ptr(), work_info_set.data_ptr()], "stale addresses"
    scale = width**-0.5 if sm_scale is None else sm_scale
    known = 1.0 if kv_scale is None else kv_scale.item()

    queries, results = q.view(tokens * fold, heads // fold, width).float(), o.view(tokens * fold, heads // fold, 512)
    rows = len(reduce_partial_map) * max_seqlen_q
    parts = torch.full((rows, 1, heads // fold, 512), float("nan"))
    logarithms = torch.full((rows, heads // fold), float("nan"))
    starts, lengths = qo_indptr.tolist(), (kv_indptr.diff() + kv_last_page_lens - 1).tolist()
    bounds, keys = work_indptr.tolist(), kv_indptr.tolist()
    for unit in range(len(bounds) - 1):
        for batch, partial, first, last, begin, end, _, _ in work_info_set[bounds[unit] : bounds[unit + 1]].tolist():
            request = batch // fold
            assert last - first <= max_seqlen_q
            assert 0 <= begin <= end <= len(kv_indices), "numbers that nobody has written"
            slots = kv_indices[begin:end].long()
            found = kv_buffer.view(torch.uint8 if kv_buffer.itemsize == 1 else kv_buffer.dtype)[slots, 0, 0]
            found = found.view(kv_buffer.dtype).float() * known
            # The last query sees the last key, and each query before it a key less.
            back = starts[request + 1] - 1 - torch.arange(first, last) // fold
            seen = torch.arange(begin, end) - keys[request] < (lengths[request] - back)[:, None]
            scores = torch.einsum("qhd,kd->qhk", queries[first:last], found) * scale
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
            logarithm = scores.logsumexp(-1)
            weights = (scores - logarithm[..., None]).exp().nan_to_num(0.0)
            answer = torch.einsum("qhk,kd->qhd", weights, found[:, :512])
            if partial < 0:
                results[first:last] = answer.to(o.dtype)
            else:
                parts[partial : partial + last - first, 0] = answer
                logarithms[partial : partial + last - first] = logarithm
    join(parts, logarithms, reduce_indptr, reduce_final_map, reduce_partial_map, results)
    return parts, None
