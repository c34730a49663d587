"""What an attention kernel is told of a step: which tokens are whose, and where the cached keys and values lie.

``R`` requests, ``T`` tokens. Requests that decode (few query tokens each) come first. A padded row has no query
tokens; a padded token's slot is negative.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

#: How a page's bytes are arranged. "plain": K and V are strided ``[pages, heads, tokens, dim]`` views that any kernel
#: can read. Any other name belongs to the implementation that both writes and reads such pages.
CacheOrder = str


@dataclass(frozen=True)
class HostLengths:
    """What the host knows of a batch without asking the device."""

    starts: Sequence[int]
    """``R + 1``: as ``query_start_loc``."""
    lengths: Sequence[int]
    """``R``: as ``seq_lens``; exact for requests that are still in their prompt, and upper bounds for others."""


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch, in the one form that all kernels read."""

    query_start_loc: torch.Tensor
    """int32 ``[R + 1]``: request ``r`` has the tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1``."""
    seq_lens: torch.Tensor
    """int32 ``[R]``: tokens of each request after this step, cached and new."""
    page_table: torch.Tensor
    """int32 ``[R, max pages]``: the pages of each request, in order."""
    slot_mapping: torch.Tensor
    """int64 ``[T]``: where each new token's key and value go: page * page size + offset; negative: nowhere."""
    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """An upper bound of ``seq_lens``; the host may not know it exactly."""
    num_decode_requests: int = 0
    num_decode_tokens: int = 0
    causal: bool = True
    host: HostLengths | None = None
    """None: it does not know, or a graph will replay the step with other lengths."""
    plans: Mapping[Hashable, object] = field(default_factory=dict)
    """What implementations worked out for this step, by their ``plan_key``."""

    def with_plans(self, plans: Mapping[Hashable, object]) -> AttentionMetadata:
        """This step with ``plans``."""
        return replace(self, plans=plans)


@dataclass(frozen=True)
class KVCacheView:
    """One layer's keys and values as a kernel sees them: ``[pages, kv heads, page size, head dim]`` of any strides.

    A stored number times its side's scale is the key's or the value's; only FP8 caches have scales other than 1.
    """

    key: torch.Tensor
    value: torch.Tensor
    order: CacheOrder = "plain"
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.k_scale == self.v_scale == 1.0 or self.key.itemsize == 1, "kernels scale FP8 caches alone"

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.key.shape[2]

    @classmethod
    def of_packed(cls, cache: torch.Tensor, head_dim: int) -> KVCacheView:
        """The view of ``[pages, kv heads, page size, K | V]``, keys and values side by side in the last dimension."""
        return cls(cache[..., :head_dim], cache[..., head_dim:])


@dataclass(frozen=True)
class LatentCacheView:
    """One layer's latents as a kernel sees them: a row for each token, ``[pages, page size, rank + rope_dim]``.

    A row has the normed latent first, then the rotated key that all heads share. A stored number times ``scale`` is
    the cached one; only FP8 caches have another scale than 1.
    """

    rows: torch.Tensor
    scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.scale == 1.0 or self.rows.itemsize == 1, "kernels scale FP8 caches alone"

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.rows.shape[1]


GraphSupport = Literal["none", "always"]
"""Whether a kernel may run inside a captured graph: without host syncs, and at one launch shape for any lengths."""
