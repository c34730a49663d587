"""SGLang's pools as the core sees them: which pages a request has, and a layer's keys and values.

A pool gives each token a slot. Page ``p`` is the slots ``p * page_size .. (p + 1) * page_size - 1``, and a request's
tokens fill its pages in order. The page of slot 0 belongs to no request: padded tokens are written there.

A hybrid pool keeps layers with a window in a second, smaller pool with slots of its own. Beside linear attention, whose
states have a pool of their own (:mod:`.states`), a pool has the other layers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from atom_core.cache import Cache, CacheSpec, KVCacheView, LatentCacheView, LatentSpec

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class Pools:
    """The two pools of a runner.

    Raises:
        ValueError: a pool of another kind than plain keys and values or latents, or one whose slots move.
    """

    def __init__(self, runner: ModelRunner) -> None:
        if runner.kv_index_translator.is_translating:
            raise ValueError(
                "--attention-backend atom reads slots where they are, and does not follow those of a unified pool; "
                "leave out --enable-unified-memory, or name another --attention-backend."
            )
        self.page_size = int(runner.page_size)
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.kv: Any = runner.token_to_kv_pool
        self._pages: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        #: Whether the pool is MLA's: one row a token, of a latent and a rotated key.
        self.latent = type(self.kv) is MLATokenToKVPool and not self.kv.use_dsa
        self.hybrid = isinstance(self.kv, SWAKVPool) and self.kv.swa_layer_nums > 0
        inner: tuple[Any, ...] = (self.kv,)
        if isinstance(self.kv, SWAKVPool):
            inner = self.kv.full_kv_pool, self.kv.swa_kv_pool
        elif isinstance(self.kv, HybridLinearKVPool):
            inner = (self.kv.full_kv_pool,)
        for pool in inner:
            layout = getattr(pool, "kv_cache_layout", "nhd")
            if not (self.latent or isinstance(pool, MHATokenToKVPool)) or layout != "nhd":
                raise ValueError(
                    f"--attention-backend atom reads pools of plain keys and values, token by token, not "
                    f"{type(pool).__name__} in the layout {layout!r}; leave SGLANG_USE_HND_KVCACHE and "
                    "SGLANG_AITER_KV_CACHE_LAYOUT unset, or name another --attention-backend."
                )

    @property
    def dtype(self) -> torch.dtype:
        """Of cached keys and values."""
        dtype: torch.dtype = self.kv.dtype
        return dtype

    def is_windowed(self, layer_id: int) -> bool:
        """Whether this layer's tokens are in the windowed pool."""
        return self.hybrid and bool(self.kv.layers_mapping[layer_id][1])

    def view(self, layer_id: int, k_scale: float = 1.0, v_scale: float = 1.0) -> KVCacheView:
        """A layer's pages."""
        keys, values = self.kv.get_key_buffer(layer_id), self.kv.get_value_buffer(layer_id)
        return KVCacheView(
            self._paged((layer_id, "k"), keys), self._paged((layer_id, "v"), values), k_scale=k_scale, v_scale=v_scale
        )

    def latents(self, layer_id: int) -> LatentCacheView:
        """A layer's pages of latents."""
        return LatentCacheView(self.kv.get_key_buffer(layer_id).squeeze(1).unflatten(0, (-1, self.page_size)))

    def cache(self, spec: CacheSpec, layer_id: int) -> Cache:
        """A layer's cache, as its mixer's ``spec`` says."""
        return self.latents(layer_id) if isinstance(spec, LatentSpec) else self.view(layer_id)

    def _paged(self, which: tuple[int, str], rows: torch.Tensor) -> torch.Tensor:
        """``[slots, K, D]`` as ``[pages, K, page size, D]``.

        The view is made once for each tensor of the pool: outside of graphs, the host's time counts.
        """
        made_of, pages = self._pages.get(which, (None, rows))
        if made_of is not rows:
            pages = rows.unflatten(0, (-1, self.page_size)).transpose(1, 2)
            self._pages[which] = rows, pages
        return pages

    def num_pages(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens of a request fill."""
        return -(-tokens // self.page_size)

    def table_width(self, tokens: int) -> int:
        """Columns of a table for so many tokens: Triton compiles anew for a number that 16 does not divide."""
        return -(-self.num_pages(tokens) // 16) * 16

    def page_table(self, requests: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        """int32 ``[R, pages]`` of the requests at rows ``requests [R]``, wide enough for ``max_seq_len`` tokens."""
        width = self.table_width(max_seq_len)
        first_slots = self.req_to_token[:, : width * self.page_size : self.page_size][requests]
        table = first_slots // self.page_size if self.page_size > 1 else first_slots
        missing = width - table.shape[1]
        return F.pad(table, (0, missing)) if missing else table

    def windowed_table(self, page_table: torch.Tensor) -> torch.Tensor:
        """The same requests' pages in the windowed pool; pages that have left the window become page 0."""
        slots = self.windowed_slots(page_table.long().flatten() * self.page_size)
        return (slots // self.page_size).to(torch.int32).view_as(page_table)

    @property
    def windowed_mapping(self) -> torch.Tensor | None:
        """The windowed pool's slot of each slot of the full pool: one tensor that SGLang updates."""
        mapping: torch.Tensor | None = self.kv.full_to_swa_index_mapping if self.hybrid else None
        return mapping

    def windowed_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """``slots [T]`` of the full pool in the windowed one."""
        mapped: torch.Tensor = self.kv.translate_loc_from_full_to_swa(slots)
        return mapped.to(torch.int64)
