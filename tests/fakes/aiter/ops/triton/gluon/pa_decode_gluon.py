"""Decode attention in Gluon over shuffled pages, of up to four tokens a request."""

import os

import torch
from aiter import _paged, dtypes
from aiter._recorded import real


@real("aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits")
def get_recommended_splits(num_sequences, num_kv_heads, split_kv_blocks=1):
    units = 304 if os.environ["GPU_ARCHS"] == "gfx942" else 256
    return min(-(-2 * units // (num_sequences * num_kv_heads * split_kv_blocks)) * split_kv_blocks, 8)


@real("aiter.pa_decode_gluon")
def pa_decode_gluon(
    output,
    query,
    key_cache,
    value_cache,
    context_lengths,
    block_tables,
    softmax_scale,
    query_length,
    max_context_partition_num,
    context_partition_size=256,
    compute_type=torch.bfloat16,
    query_scale=None,
    key_scale=None,
    value_scale=None,
    exp_sums=None,
    max_logits=None,
    temporary_output=None,
    alibi_slopes=None,
    sinks=None,
    sliding_window=0,
    ps=True,
):
    assert (query_scale, exp_sums, max_logits, temporary_output, alibi_slopes) == (None, None, None, None, None)
    assert ps
    assert 1 <= max_context_partition_num <= 8
    assert context_partition_size in (128, 256)
    assert not sliding_window or max_context_partition_num == 1
    assert compute_type == query.dtype
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert key_cache.dtype in (query.dtype, dtypes.fp8)
    assert value_cache.dim() == 5, "values of four dimensions are in another order"
    assert query.is_contiguous()
    assert output.is_contiguous(), "a copy would be written to"
    heads, dim = query.shape[1:]
    group = heads // key_cache.shape[1]
    assert dim in (64, 128), "sizes of heads that aiter tests"
    assert query_length <= 4
    assert query_length * group <= 64
    page_size = key_cache.shape[3]
    assert page_size in (16, 64, 1024)
    assert not (sliding_window and page_size == 1024)
    k_scale = v_scale = 1.0
    if key_cache.dtype == dtypes.fp8 and key_scale is not None and value_scale is not None:
        assert key_scale.numel() == value_scale.numel() == 1, "the form with a scale for all"
        k_scale, v_scale = key_scale.item(), value_scale.item()
    requests = query.shape[0] // query_length
    assert requests == context_lengths.shape[0] == block_tables.shape[0]
    # A window leaves out as many keys as there are queries.
    window = sliding_window - query_length if sliding_window else None
    for request, length in enumerate(context_lengths.tolist()):
        rows = slice(request * query_length, (request + 1) * query_length)
        if not length:
            output[rows] = float("nan")
            continue
        pages = _paged.pages_of(block_tables, request, length, page_size)
        keys = _paged.shuffled_keys(key_cache, pages)[:length] * k_scale
        values = _paged.shuffled_values(value_cache, pages)[:length] * v_scale
        found = _paged.attend(query[rows], keys, values, softmax_scale, window=window, sinks=sinks)
        output[rows] = found.to(output.dtype)
