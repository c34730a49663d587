"""How decode over latents is shared out among compute units: what is to be read by whom, and where parts meet.

The arithmetic is that of aiter's kernel for pages of one token and batches whose requests have equally many queries:
units take requests in order, and one that has no room for the rest of a request leaves it to the next.
"""

import os
from math import ceil

import torch
from aiter._recorded import real
from aiter._shared_out import UNITS
from aiter.ops.enum import MlaVersion

#: Blocks that a part costs beside those that it reads.
_OVERHEAD = 16


def folded(arch, heads, q_dtype, kv_dtype):
    """How many requests of 16 heads one request is taken for."""
    native = heads == 16 or (arch == "gfx950" and q_dtype == kv_dtype == torch.bfloat16)
    return 1 if native else heads // 16


def _of_64(arch, heads, queries, q_dtype, kv_dtype):
    in_bf16 = arch == "gfx950" and q_dtype == kv_dtype == torch.bfloat16
    return in_bf16 and heads * queries >= 64 and heads <= 64 and (heads * queries < 128 or heads == 48)


@real("aiter.get_mla_metadata_info_v1")
def get_mla_metadata_info_v1(
    batch_size,
    max_seqlen_qo,
    num_head_qo,
    q_dtype,
    kv_dtype,
    is_sparse,
    fast_mode=True,
    num_kv_splits=32,
    intra_batch_mode=False,
    max_split_per_batch=-1,
):
    assert num_head_qo % 8 == 0
    assert fast_mode
    assert (is_sparse, num_kv_splits, intra_batch_mode, max_split_per_batch) == (False, 32, False, -1)
    arch = os.environ["GPU_ARCHS"]
    units, rows = UNITS[arch], max_seqlen_qo * num_head_qo
    tiles = ceil(rows / 16)
    if _of_64(arch, num_head_qo, max_seqlen_qo, q_dtype, kv_dtype):
        tiles = max_seqlen_qo if num_head_qo > 32 else ceil(rows / 64)
    elif num_head_qo == 16:
        tiles = ceil(rows / 128)
    elif arch == "gfx950" and q_dtype == kv_dtype == torch.bfloat16 and (rows >= 128 or num_head_qo > 64):
        tiles = max_seqlen_qo if num_head_qo > 64 else ceil(rows / 128)
    return (
        ((2), torch.uint64),
        ((units + 1), torch.int32),
        (((batch_size + units - 1) * tiles, 8), torch.int32),
        ((batch_size * tiles + 1), torch.int32),
        ((batch_size * tiles, 2), torch.int32),
        (min(batch_size + units - 1, 2 * (units - 1)) * tiles, torch.int32),
    )


@real("aiter.get_mla_metadata_v1")
def get_mla_metadata_v1(
    seqlens_qo_indptr,
    seqlens_kv_indptr,
    kv_last_page_lens,
    num_heads_per_head_k,
    num_heads_k,
    is_causal,
    work_metadata_ptrs,
    work_info_set,
    work_indptr,
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    page_size=1,
    kv_granularity=16,
    max_seqlen_qo=-1,
    uni_seqlen_qo=-1,
    fast_mode=True,
    topk=-1,
    max_split_per_batch=-1,
    intra_batch_mode=False,
    is_cp_round_robin=False,
    mla_version=MlaVersion.V32.value,
    dtype_q_nope=None,
    dtype_q_rope=None,
    dtype_kv_nope=None,
    dtype_kv_rope=None,
    dtype_q=None,
    dtype_kv=None,
):
    assert (num_heads_k, page_size, kv_granularity) == (1, 1, 16)
    assert fast_mode
    assert (topk, max_split_per_batch, intra_batch_mode, is_cp_round_robin, mla_version) == (-1, -1, False, False, 0)
    assert dtype_q_nope is dtype_q_rope is dtype_kv_nope is dtype_kv_rope is None
    assert max_seqlen_qo >= uni_seqlen_qo >= 1
    assert len(seqlens_qo_indptr) == len(seqlens_kv_indptr) == len(kv_last_page_lens) + 1
    arch, heads = os.environ["GPU_ARCHS"], num_heads_per_head_k
    assert heads % 16 == 0
    assert work_indptr.shape == (UNITS[arch] + 1,)
    # The kernel has no more than these addresses, so what lies there must stay.
    work_metadata_ptrs.copy_(torch.tensor([work_indptr.data_ptr(), work_info_set.data_ptr()], dtype=torch.uint64))

    fold, queries = folded(arch, heads, dtype_q, dtype_kv), uni_seqlen_qo
    heads //= fold
    assert fold == 1 or queries == 1, "several queries of a request that is several are not stood in for"
    packed = 64 if _of_64(arch, heads, max_seqlen_qo, dtype_q, dtype_kv) else 128
    tiles = 1
    if max_seqlen_qo * num_heads_per_head_k > packed:
        tiles = queries if heads * 2 > packed else ceil(queries * heads / packed)
    rows_a_tile = ceil(queries / tiles)

    ends = seqlens_kv_indptr.tolist()
    pending = []  # (request of 16 heads, first query, past the last, first key, past the last)
    for request in range(len(ends) - 1):
        for batch in range(request * fold, (request + 1) * fold):
            for tile in range(tiles):
                first = batch * queries + tile * rows_a_tile
                last = min(first + rows_a_tile, (batch + 1) * queries)
                unseen = tiles - 1 - tile if is_causal else 0
                pending.append((batch, first, last, ends[request], ends[request + 1], unseen))
    total = sum(ceil((end - begin) / kv_granularity) + _OVERHEAD for *_, begin, end, _ in pending)
    payload = ceil(total / UNITS[arch]) + _OVERHEAD

    works, starts, sums, finals, partials = [], [0], [0], [], []
    partial, at, block, pieces = 0, 0, 0, []
    for _ in range(UNITS[arch]):
        room = payload
        while at < len(pending):
            batch, first, last, begin, end, unseen = pending[at]
            left = ceil((end - begin) / kv_granularity) - block
            # What is as good as read is read to its end, so that a part is never of keys that nobody sees.
            fits = room >= left + _OVERHEAD
            taken = left if fits else room - _OVERHEAD
            if not fits and taken <= 0:
                break
            start = begin + block * kv_granularity
            stop = min(start + taken * kv_granularity, end - unseen)
            if not fits and end - stop < max_seqlen_qo:
                fits, taken, stop = True, left, end - unseen
            if fits and not pieces:
                works.append([batch, -1, first, last, start, stop, end - stop, 0])
            else:
                pieces.append(partial)
                works.append([batch, partial, first, last, start, stop, end - stop, 0])
                partial += last - first
            if not fits:
                block += taken
                break
            if pieces:
                finals.append((len(sums) - 1, first, last))
                partials += pieces
            sums.append(len(partials))
            room -= taken + _OVERHEAD
            at, block, pieces = at + 1, 0, []
        starts.append(len(works))
    assert at == len(pending)

    for index, work in enumerate(works):
        work_info_set[index] = torch.tensor(work, dtype=torch.int32)
    work_indptr.copy_(torch.tensor(starts))
    reduce_indptr[: len(sums)] = torch.tensor(sums, dtype=torch.int32)
    reduce_indptr[len(sums) :] = sums[-1]
    for tile, first, last in finals:
        reduce_final_map[tile] = torch.tensor((first, last), dtype=torch.int32)
    reduce_partial_map[: len(partials)] = torch.tensor(partials, dtype=torch.int32)
