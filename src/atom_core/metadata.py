"""What an attention kernel is told of a step: which tokens are whose, and where the cached keys and values lie.

``R`` requests, ``T`` tokens. Requests that decode (few query tokens each) come first. A padded row has no query
tokens; a padded token's slot is negative.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

#: How a page's bytes are arranged. "plain": K and V are strided ``[pages, heads, tokens, dim]`` views that any kernel
#: can read. "shuffled": as aiter's kernels for AMD's matrix cores read them, ``x`` numbers of 16 bytes together, K as
#: ``[pages, heads, dim / x, tokens, x]`` and V as ``[pages, heads, tokens / x, dim, x]``. Any other name belongs to the
#: implementation that both writes and reads such pages.
CacheOrder = str
SHUFFLED: CacheOrder = "shuffled"


@dataclass(frozen=True)
class CacheLayout:
    """What the bytes of a layer's pages mean: whoever writes them and whoever reads them must go by the same.

    Shapes do not tell: pages of either order have as many bytes.
    """

    order: CacheOrder
    page_size: int
    dtype: torch.dtype
    scales: Literal["none", "layer"]
    """"layer": each side of an FP8 cache has one number that what is stored is multiplied by."""


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
    kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What the first layer's kernel worked out on the device for all others; another batch starts without."""

    def with_plans(self, plans: Mapping[Hashable, object]) -> AttentionMetadata:
        """This step with ``plans``."""
        planned = replace(self, plans=plans)
        object.__setattr__(planned, "kept", self.kept)  # it is the same batch
        return planned

    def decodes_and_others(self) -> tuple[AttentionMetadata, AttentionMetadata]:
        """The requests that decode, which come first, and those behind them, each as a batch of its own; kept."""
        key = ("decodes and others", capturing(self.seq_lens.device))
        if key not in self.kept:
            self.kept[key] = self._decodes(), self._others()
        found: tuple[AttentionMetadata, AttentionMetadata] = self.kept[key]
        return found

    def _decodes(self) -> AttentionMetadata:
        requests, tokens = self.num_decode_requests, self.num_decode_tokens
        return replace(
            self,
            query_start_loc=self.query_start_loc[: requests + 1],
            seq_lens=self.seq_lens[:requests],
            page_table=self.page_table[:requests],
            num_requests=requests,
            num_tokens=tokens,
            max_query_len=1 if tokens == requests else self.max_query_len,
        )

    def _others(self) -> AttentionMetadata:
        requests, tokens = self.num_decode_requests, self.num_decode_tokens
        return replace(
            self,
            query_start_loc=self.query_start_loc[requests:] - tokens,
            # Copies, as kernels are compiled anew for pointers that are aligned otherwise.
            seq_lens=self.seq_lens[requests:].clone(),
            page_table=self.page_table[requests:].clone(),
            slot_mapping=self.slot_mapping[tokens:],
            num_requests=self.num_requests - requests,
            num_tokens=self.num_tokens - tokens,
            num_decode_requests=0,
            num_decode_tokens=0,
        )


def capturing(device: torch.device) -> bool:
    """Whether a graph is captured: what is made then is the graph's, and what was kept before is not in it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class KVCacheView:
    """One layer's keys and values as a kernel sees them: ``[pages, kv heads, page size, head dim]`` of any strides.

    In the order "shuffled" they have the five dimensions that :data:`CacheOrder` gives; within a page and head nothing
    lies between numbers, and both sides have the same strides.

    A stored number times its side's scale is the key's or the value's; only FP8 caches have scales other than 1.
    """

    key: torch.Tensor
    value: torch.Tensor
    order: CacheOrder = "plain"
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.k_scale == self.v_scale == 1.0 or self.key.itemsize == 1, "kernels scale FP8 caches alone"
        if self.order == SHUFFLED:
            pages, heads, parts, tokens, together = self.key.shape
            assert together * self.key.itemsize == 16, "16 bytes lie together"
            assert self.value.shape == (pages, heads, tokens // together, parts * together, together)
            inner = tokens * parts * together
            assert self.key.stride()[1:] == (inner, tokens * together, together, 1)
            assert self.value.stride()[1:] == (inner, parts * together * together, together, 1)
            assert self.key.stride(0) == self.value.stride(0), "aiter's kernels go through both by the keys' strides"

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.key.shape[3] if self.order == SHUFFLED else self.key.shape[2]

    @property
    def layout(self) -> CacheLayout:
        """What the bytes mean."""
        return CacheLayout(self.order, self.page_size, self.key.dtype, "layer" if self.key.itemsize == 1 else "none")

    def expect(self, order: CacheOrder, dtype: torch.dtype) -> None:
        """Assert that pages are what a kernel that reads or writes ``order`` and ``dtype`` takes them for."""
        wanted = CacheLayout(order, self.page_size, dtype, "layer" if dtype.itemsize == 1 else "none")
        assert self.layout == wanted, f"the cache is {self.layout}, and the kernel is for {wanted}"

    @classmethod
    def of_packed(cls, cache: torch.Tensor, head_dim: int) -> KVCacheView:
        """The view of ``[pages, kv heads, page size, K | V]``, keys and values side by side in the last dimension."""
        return cls(cache[..., :head_dim], cache[..., head_dim:])

    @classmethod
    def of_shuffled(cls, key: torch.Tensor, value: torch.Tensor, heads: int, page_size: int) -> KVCacheView:
        """The view of ``[pages, heads * page size * head dim]``, a row of bytes a page for keys and one for values."""
        together = 16 // key.itemsize
        dim = key.shape[1] // (heads * page_size)
        return cls(
            key.view(-1, heads, dim // together, page_size, together),
            value.view(-1, heads, page_size // together, dim, together),
            SHUFFLED,
        )

    def as_plain(self) -> KVCacheView:
        """The same keys and values in plain pages: a copy where these are shuffled."""
        if self.order != SHUFFLED:
            return self
        dtype = self.key.dtype
        raw = torch.uint8 if self.key.itemsize == 1 else dtype  # torch does not copy all of FP8 on every device
        key = self.key.view(raw).permute(0, 1, 3, 2, 4).flatten(3)
        value = self.value.view(raw).permute(0, 1, 2, 4, 3).flatten(2, 3)
        return replace(self, key=key.view(dtype), value=value.view(dtype), order="plain")


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


SameStepReads = Literal["never", "at page starts", "anywhere"]
"""Where a request's new token stands that has another request's token of the very same step among its cached ones.

"never": there are no such requests. "at page starts": at the start of a page, as whole pages are shared.
"""

GraphSupport = Literal["none", "always"]
"""Whether a kernel may run inside a captured graph: without host syncs, and at one launch shape for any lengths."""
