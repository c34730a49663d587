"""What a model keeps of a sequence between steps: paged keys and values, or paged latents (MLA).

A token mixer states a :data:`CacheSpec`; an adapter turns it into the framework's own and gives each layer a view of
the framework's memory. The core allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

#: How a page's bytes are arranged. "plain": K and V are strided ``[pages, heads, tokens, dim]`` views that any kernel
#: can read. "shuffled": as aiter's kernels for AMD's matrix cores read them, ``x`` numbers of 16 bytes together, K as
#: ``[pages, heads, dim / x, tokens, x]`` and V as ``[pages, heads, tokens / x, dim, x]``. Any other name belongs to the
#: implementation that both writes and reads such pages.
CacheOrder = str
SHUFFLED: CacheOrder = "shuffled"


@dataclass(frozen=True)
class CacheLayout:
    """What the bytes of a layer's pages mean. The kernel that writes them and the one that reads them must agree.

    Shapes do not tell: pages of either order have as many bytes.
    """

    order: CacheOrder
    page_size: int
    dtype: torch.dtype
    scales: Literal["none", "layer"]
    """"layer": each side of an FP8 cache has one number that what is stored is multiplied by."""


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
        assert self.k_scale == self.v_scale == 1.0 or self.key.itemsize == 1, "only FP8 caches have scales"
        if self.order == SHUFFLED:
            pages, heads, groups, tokens, together = self.key.shape
            assert together * self.key.itemsize == 16, "16 bytes lie together"
            assert self.value.shape == (pages, heads, tokens // together, groups * together, together)
            inner = tokens * groups * together
            assert self.key.stride()[1:] == (inner, tokens * together, together, 1)
            assert self.value.stride()[1:] == (inner, groups * together * together, together, 1)
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
        assert self.scale == 1.0 or self.rows.itemsize == 1, "only FP8 caches have scales"

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.rows.shape[1]


@dataclass(frozen=True)
class KeyValueSpec:
    """Paged keys and values of each key/value head."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    """Older tokens than these, the newest included, are never read."""
    order: CacheOrder = "plain"


@dataclass(frozen=True)
class LatentSpec:
    """Paged rows, one a token for all heads (MLA). Every rank has all of them."""

    row: int
    """Elements of a row."""
    dtype: torch.dtype


@dataclass(frozen=True)
class StateSpec:
    """A state of one size a request, whatever its length: some tensors, each in a slot of ``[slots, *shape]``."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class StateView:
    """One layer's states, a tensor of any strides for each of :attr:`StateSpec.shapes`: ``[slots, *shape]``.

    A convolution's inputs, ``[slots, rows, channels]``, have as many rows more as there may be drafts.
    """

    tensors: tuple[torch.Tensor, ...]
    unverified: tuple[torch.Tensor, ...] = ()
    """``[R, N, *shape]``: where the states of requests that verify drafts are written instead, by row and token.

    Of a convolution's inputs ``[R, rows, channels]``. Empty: they are written to :attr:`tensors`.
    """


#: What a token mixer keeps of a sequence between steps, and a layer's view of it.
CacheSpec: TypeAlias = KeyValueSpec | LatentSpec | StateSpec
Cache: TypeAlias = KVCacheView | LatentCacheView | StateView
