"""How pages are shared out among compute units: what is to be read by whom, and where parts of a request meet.

The arithmetic is that of aiter's kernel: each head of keys has as many units as the others, which take requests in
order, as many pages each as the others but for one; a unit leaves what it has no room for to the next.
"""

import os
from itertools import pairwise
from math import ceil

import torch
from aiter._recorded import real
from aiter._shared_out import UNITS


@real("aiter.get_pa_metadata_info_v1")
def get_pa_metadata_info_v1(batch_size, num_head_k=1):
    units = UNITS[os.environ["GPU_ARCHS"]]
    return (
        ((2), torch.uint64),
        ((units + 1), torch.int32),
        (((batch_size + units - 1) * num_head_k, 8), torch.int32),
        ((batch_size + 1), torch.int32),
        ((batch_size, 2), torch.int32),
        (min(batch_size + units - 1, (units - 1) * 2), torch.int32),
    )


@real("aiter.get_pa_metadata_v1")
def get_pa_metadata_v1(
    seqlens_qo_indptr,
    pages_kv_indptr,
    context_lens,
    num_heads_per_head_k,
    num_heads_k,
    is_causal,
    work_metadata_ptrs,
    work_indptr,
    work_info,
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    kv_granularity=16,
    block_size=16,
    max_seqlen_qo=-1,
    uni_seqlen_qo=-1,
    fast_mode=True,
    topk=-1,
    max_split_per_batch=-1,
):
    units, requests = UNITS[os.environ["GPU_ARCHS"]], len(context_lens)
    assert (fast_mode, topk, max_split_per_batch) == (True, -1, -1)
    assert is_causal
    assert units % num_heads_k == 0, "each head of keys has as many units"
    assert kv_granularity == block_size, "parts are of whole pages"
    assert kv_granularity & (kv_granularity - 1) == 0
    assert max_seqlen_qo == uni_seqlen_qo >= 1
    assert max_seqlen_qo * num_heads_per_head_k <= 128, "more rows are several tiles, which are not stood in for"
    assert len(seqlens_qo_indptr) == len(pages_kv_indptr) == requests + 1
    assert seqlens_qo_indptr.stride() == pages_kv_indptr.stride() == (1,)
    assert work_indptr.shape == (units + 1,)
    # The kernel has no more than these addresses, so what lies there must stay.
    work_metadata_ptrs.copy_(torch.tensor([work_indptr.data_ptr(), work_info.data_ptr()], dtype=torch.uint64))

    counts = [ceil(length / kv_granularity) for length in context_lens.tolist()]
    first_pages = pages_kv_indptr.tolist()
    assert counts == [end - begin for begin, end in pairwise(first_pages)]
    each = units // num_heads_k
    average, remainder = divmod(sum(counts), each)
    works, starts, sums, finals, partials = [], [0], [], [], []
    for head in range(num_heads_k):
        # Heads are shared out alike, so where parts meet is the same for all.
        sums, finals, partials, partial = [0], [], [], 0
        request, taken, pieces = 0, 0, []
        while request < requests:
            unit = len(starts) - 1
            assert unit < units, "more than the units have room for"
            room = average + (unit % each < remainder)
            while request < requests:
                left = counts[request] - taken
                first = request * uni_seqlen_qo
                begin = first_pages[request] + taken
                heads = head * num_heads_per_head_k | (head + 1) * num_heads_per_head_k << 16
                fits = room >= left
                if not fits and not room:
                    break
                place = partial if pieces or not fits else -1
                end = begin + (left if fits else room)
                works.append([request, place, first, first + uni_seqlen_qo, begin, end, 0, heads])
                if place >= 0:
                    pieces.append(partial)
                    partial += uni_seqlen_qo
                if not fits:
                    taken += room
                    break
                if pieces:
                    finals.append((first, first + uni_seqlen_qo))
                    partials += pieces
                    sums.append(len(partials))
                room -= left
                request, taken, pieces = request + 1, 0, []
            starts.append(len(works))
    starts += [len(works)] * (units + 1 - len(starts))

    work_info[: len(works)] = torch.tensor(works, dtype=torch.int32).view(-1, 8)
    work_indptr.copy_(torch.tensor(starts))
    reduce_indptr.fill_(sums[-1])
    reduce_indptr[: len(sums)] = torch.tensor(sums, dtype=torch.int32)
    reduce_final_map[: len(finals)] = torch.tensor(finals, dtype=torch.int32).view(-1, 2)
    reduce_partial_map[: len(partials)] = torch.tensor(partials, dtype=torch.int32)
