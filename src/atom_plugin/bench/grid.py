"""The grid of `atom-plugin bench kernels --grid`: attention of requests that decode one token each, over long caches.

A cell is one call of an op: requests of as many cached tokens each (the new one among them), heads, a page size and the
cache's dtype. Which cells there are is chosen by axis. This module has the arithmetic; it needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_plugin.bench.step import cache_torch_dtype, torch_dtype

#: Attention over latents.
LATENT_OP = "mla_attention"
#: The ops that a grid has: what a layer runs in a step of decodes, from raw qkv and with the cache write; the attention
#: that prompts and drafts run; and that over latents.
GRID_OPS = ("decode_attention", "attention", LATENT_OP)
DEFAULT_OPS = ("decode_attention", LATENT_OP)
#: Of latents, as all DeepSeek models have them: rank, dimension with rope, and of a head without.
RANK, ROPE_DIM, NOPE_DIM = 512, 64, 128
#: FlashAttention splits a request's keys among at most so many programs in a graph, each with float32 results.
_SPLITS = 32
#: Graphs of each contender, and contenders that have split results at the same time at most.
GRAPHS, _CONTENDERS = 2, 3


@dataclass(frozen=True)
class Axes:
    """The values of each axis."""

    requests: tuple[int, ...] = (1, 8, 32, 64, 128)
    tokens: tuple[int, ...] = (512, 2048, 8192, 32_768, 131_072)
    group: tuple[int, ...] = (4,)
    """Query heads that share a key/value head."""
    head_dim: tuple[int, ...] = (128,)
    kv_heads: tuple[int, ...] = (8,)
    heads: tuple[int, ...] = (16, 128)
    """Query heads over latents."""
    page_size: tuple[int, ...] = ()
    """Empty: 16, and 64 for latents."""
    cache_dtype: tuple[str, ...] = ("auto",)


#: What :class:`Axes` has under `--all-shapes`, where it is not said otherwise.
ALL_SHAPES = Axes(group=(4, 5, 7, 8, 16), head_dim=(64, 128, 256), page_size=(16, 64), cache_dtype=("auto", "fp8_e4m3"))
#: The axes by the option's name.
AXES: Mapping[str, str] = {f"--{it.name.replace('_', '-')}": it.name for it in fields(Axes)}


def has_axis(op: str, name: str) -> bool:
    """Whether cells of an op differ along an axis of :class:`Axes`."""
    return name not in (("group", "head_dim", "kv_heads") if op == LATENT_OP else ("heads",))


@dataclass(frozen=True)
class Cell:
    """One call of an op over keys and values, or over latents, which have one key/value head for all."""

    op: str
    requests: int
    tokens: int
    """Cached tokens of each request, the new one among them."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of latents the dimension of a result: their rank."""
    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    rope_dim: int = 0
    """Of latents; 0: keys and values."""

    @property
    def latent(self) -> bool:
        """Whether the cache has latents."""
        return self.rope_dim > 0

    @property
    def name(self) -> str:
        """What tells it from other cells of its op."""
        shared = f" + {self.num_kv_heads}" if not self.latent else ""
        size = f" of {self.head_dim}" if not self.latent else ""
        return (
            f"{self.requests} x {self.tokens}, {self.num_heads}{shared} heads{size}, pages of {self.page_size}, "
            f"{dtype_name(self.cache_dtype)} cache"
        )

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.head_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Cached elements of a token and key/value head: a latent and a rotated key, or a key and a value."""
        return self.query_dim if self.latent else 2 * self.head_dim

    @property
    def pages_each(self) -> int:
        """Pages of a request."""
        return -(-self.tokens // self.page_size)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """``[pages, page size, K, K | V]``, as vLLM's default layout; of latents ``[pages, page size, L + R]``."""
        pages = self.requests * self.pages_each
        heads = () if self.latent else (self.num_kv_heads,)
        return (pages, self.page_size, *heads, self.row)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.requests * self.pages_each * self.page_size * self.num_kv_heads * self.row * self._cached

    @property
    def num_bytes(self) -> int:
        """Bytes that a call reads and writes at least."""
        cached = self.requests * self.tokens * self.num_kv_heads * self.row * self._cached
        queries = self.requests * self.num_heads * (self.query_dim + self.head_dim)
        new = self.requests * 2 * self.num_kv_heads * self.head_dim if self.op == "decode_attention" else 0
        return cached + (queries + new) * self.dtype.itemsize

    @property
    def num_operations(self) -> int:
        """Operations of the scores and of the weighted sum."""
        return 2 * self.requests * self.tokens * self.num_heads * (self.query_dim + self.head_dim)

    @property
    def needed_bytes(self) -> int:
        """GPU memory that measuring takes: pages, split results of each graph, and float32 keys of one request."""
        rows = self.requests * self.num_heads
        split = GRAPHS * _CONTENDERS * _SPLITS * rows * (self.head_dim + 2) * 4
        heads = self.num_heads // self.num_kv_heads
        exact = self.tokens * (3 * self.row + 3 * heads) * 4
        return self.pool_bytes + 8 * rows * (self.query_dim + self.head_dim) * self.dtype.itemsize + split + exact

    @property
    def _cached(self) -> int:
        return self.cache_dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        """Its fields by name."""
        named = {it.name: getattr(self, it.name) for it in fields(self)}
        return {**named, "dtype": dtype_name(self.dtype), "cache_dtype": dtype_name(self.cache_dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """As "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class GridOptions:
    """What is measured."""

    ops: tuple[str, ...] = DEFAULT_OPS
    axes: Axes = field(default_factory=Axes)
    dtype: str = "bfloat16"
    repetitions: int = 10
    """Samples of each graph."""
    max_model_len: int = 131_072
    """Graphs are captured for sequences of up to so many tokens, as a server with this flag does."""

    def check(self) -> None:
        """Raise a ValueError for an unsupported option."""
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions}: a positive number is needed.")
        for op in self.ops:
            if op not in GRID_OPS:
                raise ValueError(f"--op {op!r}: a --grid has {', '.join(GRID_OPS)}.")
        for option, name in AXES.items():
            for value in getattr(self.axes, name):
                if isinstance(value, int) and value < 1:
                    raise ValueError(f"{option} {value}: a positive number is needed.")
        for tokens in self.axes.tokens:
            if tokens > self.max_model_len:
                raise ValueError(f"--tokens {tokens}: more than --max-model-len {self.max_model_len}.")
        for size in self.axes.page_size:
            if size % 16:
                raise ValueError(f"--page-size {size}: a multiple of 16 is needed.")
        for dim in self.axes.head_dim:
            if dim % 16 or dim > 256:
                raise ValueError(f"--head-dim {dim}: a multiple of 16 up to 256 is needed.")
        dtype = torch_dtype(self.dtype)
        for name in self.axes.cache_dtype:
            if cache_torch_dtype(name, dtype) not in (dtype, *FP8_DTYPES):
                raise ValueError(f"--cache-dtype {name!r}: a cache has the --dtype {self.dtype} or an FP8 one.")

    def cells(self) -> Iterator[Cell]:
        """All cells, the shortest first."""
        axes, dtype = self.axes, torch_dtype(self.dtype)
        cache_dtypes = list(dict.fromkeys(cache_torch_dtype(name, dtype) for name in axes.cache_dtype))
        for op in self.ops:
            latent = op == LATENT_OP
            pages = axes.page_size or ((64,) if latent else (16,))
            shapes = list(self._latents() if latent else self._heads())
            rope_dim = ROPE_DIM if latent else 0
            for (heads, kv_heads, dim), page, cache_dtype in product(shapes, pages, cache_dtypes):
                for tokens, requests in product(axes.tokens, axes.requests):
                    yield Cell(op, requests, tokens, heads, kv_heads, dim, page, dtype, cache_dtype, rope_dim)

    def _heads(self) -> Iterator[tuple[int, int, int]]:
        for dim, group, kv_heads in product(self.axes.head_dim, self.axes.group, self.axes.kv_heads):
            yield group * kv_heads, kv_heads, dim

    def _latents(self) -> Iterator[tuple[int, int, int]]:
        for heads in self.axes.heads:
            yield heads, 1, RANK


def axes_of(given: Mapping[str, tuple[Any, ...]], all_shapes: bool) -> Axes:
    """The default axes, or all shapes, with those that are given (and not empty) in their place."""
    return replace(ALL_SHAPES if all_shapes else Axes(), **{name: values for name, values in given.items() if values})
