"""The one op of vLLM that SGLang's rope takes on a CPU, by its definition and in place."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate `query` and `key`, `[T, H * D]` each, by the angles of `positions`; pairs are halves of a head."""
    assert is_neox, "no test model pairs neighbours"
    half = cos_sin_cache.shape[-1] // 2
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        heads = x.view(len(positions), -1, head_size)
        first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = first * cos - second * sin
        heads[..., half : 2 * half] = second * cos + first * sin
