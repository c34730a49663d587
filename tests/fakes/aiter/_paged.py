"""Attention over pages, one request at a time: pages are read by strides and bytes, as kernels read them."""

import torch


def plain_pages(side, pages):
    """Tokens of ``[blocks, tokens, heads, dim]``: float32 ``[tokens of all pages, heads, dim]``."""
    return _bytes(side)[pages].view(side.dtype).float().flatten(0, 1)


def shuffled_keys(side, pages):
    """Of ``[blocks, heads, dim / x, tokens, x]``."""
    _check_shuffled(side)
    found = _bytes(side)[pages].view(side.dtype).float()
    return found.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)


def shuffled_values(side, pages):
    """Of ``[blocks, heads, tokens / x, dim, x]``."""
    _check_shuffled(side)
    found = _bytes(side)[pages].view(side.dtype).float()
    return found.permute(0, 2, 4, 1, 3).flatten(1, 2).flatten(0, 1)


def _check_shuffled(side):
    assert side.dim() == 5
    assert side.shape[-1] * side.element_size() == 16, "16 bytes lie together"
    assert side.stride()[1:] == side[0].contiguous().stride(), "a page's bytes have no gaps"


def _bytes(side):
    return side.view(torch.uint8) if side.element_size() == 1 else side


def pages_of(block_tables, request, length, page_size):
    """The pages that a request of ``length`` tokens has; others are not looked at."""
    assert block_tables.dtype == torch.int32
    return block_tables[request, : -(-length // page_size)].long()


def attend(q, keys, values, scale, *, window=None, soft_cap=0.0, sinks=None):
    """Causal attention of ``q [m, Hq, D]``, whose last row is the last key's; ``window``: keys a query sees.

    Results are float32 ``[m, Hq, Dv]``.
    """
    (count, heads, _), length = q.shape, keys.shape[0]
    group = heads // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.repeat_interleave(group, 1)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at, other = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    hidden = other > at
    if window is not None:
        hidden = hidden | (other <= at - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        assert sinks.shape == (heads,)
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, 1)), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
