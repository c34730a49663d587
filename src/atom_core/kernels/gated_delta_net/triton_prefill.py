"""Gated DeltaNet of any batch in Triton: few tokens a request in one launch, all other requests in chunks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from atom_core.batch import Batch, BatchShape
from atom_core.cache import StateView
from atom_core.kernels.gated_delta_net.chunks import answer, carry, mix, solve
from atom_core.kernels.gated_delta_net.reference import CHUNK
from atom_core.kernels.gated_delta_net.triton_decode import MAX_TOKENS, TritonGatedDeltaDecode
from atom_core.kernels.gated_delta_net.triton_parts import assert_layout
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.triton_support import launch_options, next_power_of_2
from atom_core.types import GraphSupport

if TYPE_CHECKING:
    from atom_core.kernels.gated_delta_net import GatedDeltaNetSpec


#: The fewest columns of products on NVIDIA.
_NVIDIA_DIM = 128


class Tile(NamedTuple):
    """Of a program that carries a state on."""

    values: int
    stages: int
    """Chunks that are loaded at the same time."""
    warps: int


class TritonGatedDeltaNet:
    """See :mod:`atom_core.kernels.gated_delta_net`.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        hopper: whether the GPU is a Hopper; see :class:`TritonGatedDeltaDecode`.
    """

    graph_support: GraphSupport = "decodes"

    def __init__(self, spec: GatedDeltaNetSpec, nvidia: bool, overlap: bool, hopper: bool = False) -> None:
        self.spec = spec
        self.nvidia, self.overlap, self.hopper = nvidia, overlap, hopper
        self.decode = TritonGatedDeltaDecode(spec, nvidia, overlap, hopper)
        wide = spec.dtype == torch.float32
        #: Of products: on AMD float32 is multiplied as it is.
        self.precision = "tf32x3" if wide and nvidia else "ieee"
        self.warps = 8 if wide and nvidia else 4

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        if self.decode.takes(shape):
            yield from self.decode.attention_compile_keys(shape, device)
            return
        decodes, spec = shape.num_decode_requests, self.spec
        if decodes:
            yield from self.decode.attention_compile_keys(replace(shape, queries=shape.queries[:decodes]), device)
        # Other rows begin behind those of decodes, where Triton compiles anew if that is not aligned to 16 bytes.
        row = (spec.channels + spec.num_value_heads * (spec.value_dim + 2)) * spec.dtype.itemsize
        yield "chunks", sum(shape.queries[:decodes]) * row % 16 == 0

    def scratch_bytes(self, num_tokens: int, max_requests: int) -> int:
        """See :class:`atom_core.kernels.gated_delta_net.GatedDeltaNetKernel`."""
        spec, padded = self.spec, self.padded
        tiles = CHUNK * (2 * spec.num_key_heads + 3 * spec.num_value_heads) * padded
        elements = tiles + spec.num_value_heads * padded**2
        places = num_tokens // CHUNK + min(max_requests, num_tokens)
        return places * (elements * spec.dtype.itemsize + 4 * spec.num_value_heads * CHUNK)

    def __call__(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        cache: StateView,
        batch: Batch,
        out: torch.Tensor,
    ) -> None:
        """Write the outputs of the requests' tokens to ``out``, and their states to the cache."""
        if self.decode.takes(batch):
            self.decode(qkvz, ba, weights, cache, batch, out)
            return
        decodes, others = batch.decodes_and_others() if batch.num_decode_requests else (batch, batch)
        if not self.decode.takes(decodes):
            assert batch.states is not None
            # Where states to verify have a place of their own, a batch with rows that verify has no others.
            few = batch.states.verifies is None or (decodes is batch and not cache.unverified)
            assert few, f"tokens to verify are {MAX_TOKENS} at most, and in front"
            self._chunks(qkvz, ba, weights, cache, batch, out)
            return
        tokens = batch.num_decode_tokens
        self.decode(qkvz[:tokens], ba[:tokens], weights, cache, decodes, out[:tokens])
        self._chunks(qkvz[tokens:], ba[tokens:], weights, cache, others, out[tokens:])

    @property
    def padded(self) -> int:
        """Columns that products have for keys and values.

        ptxas 12.8, which Triton 3.6 has, miscompiles kernels with products of 16 and 32 columns for Hopper: they read
        beyond shared memory. 12.9 and 13.0 do not. Models have 128.
        """
        padded: int = next_power_of_2(max(self.spec.key_dim, self.spec.value_dim))
        return max(_NVIDIA_DIM if self.nvidia else 16, padded)

    @property
    def tile(self) -> Tile:
        """The best of nine for Qwen3-Next on an H200."""
        values = self.padded
        if not self.nvidia or self.spec.dtype == torch.float32:
            return Tile(min(values, 32), stages=1, warps=4)
        # One prompt of 8,192 tokens, 48 heads, H200: 166 us; with 3 stages 177, with 2 270. Four take 161 KiB of shared
        # memory on Hopper and 137 elsewhere, and GPUs such as an L40S have 99 for a program.
        return Tile(min(values, 64), stages=4 if self.hopper else 3, warps=4)

    def _chunks(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        cache: StateView,
        batch: Batch,
        out: torch.Tensor,
    ) -> None:
        spec, states = self.spec, batch.states
        assert states is not None
        (conv, recurrent), snapshots = cache.tensors, states.snapshots
        assert_layout(spec, qkvz, ba, weights, recurrent, out)
        num_tokens, num_requests = qkvz.shape[0], states.slots.shape[0]
        places = num_tokens // CHUNK + num_requests
        HK, HV, K, V = spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim
        padded = self.padded
        mixed = qkvz.new_empty(places, 2 * HK + HV, CHUNK, padded)
        w, u = qkvz.new_empty(places, HV, CHUNK, padded), qkvz.new_empty(places, HV, padded, CHUNK)
        states_before = qkvz.new_empty(places, HV, padded, padded)
        totals = torch.empty(places, HV, CHUNK, dtype=torch.float32, device=qkvz.device)
        starts, slots = batch.query_start_loc, states.slots
        block_size = None if states.blocks is None else states.blocks.size
        read = starts, slots, batch.seq_lens, states.num_accepted, block_size
        sizes, width, tile = {"K": K, "V": V}, spec.conv_width, self.tile
        constants = {"HK": HK, "HV": HV, "PADDED": padded, "OVERLAP": self.overlap, **launch_options(self.overlap)}
        products = {"PRECISION": self.precision, **constants}
        mix[places, 2 * HK + HV](
            qkvz, weights.conv, conv, *read, mixed, num_requests, qkvz.stride(0), *conv.stride(), slots.stride(0),
            W=width, num_warps=8, **sizes, **constants,
        )  # fmt: skip
        solve[places, HV](
            ba, weights.a_log, weights.dt_bias, starts, slots, batch.seq_lens, block_size, mixed, w, u, totals,
            num_requests, ba.stride(0), slots.stride(0), INVERSE=self._inverse, num_warps=self.warps,
            **self._registers, **products,
        )  # fmt: skip
        carry[padded // tile.values, HV, num_requests](
            qkvz, conv, recurrent, *read, *((None, None) if snapshots is None else (snapshots.slots, snapshots.tokens)),
            mixed, w, u, totals, states_before, qkvz.stride(0), *conv.stride(), recurrent.stride(0), slots.stride(0),
            BLOCK_V=tile.values, W=width, ROWS=next_power_of_2(width - 1), num_warps=tile.warps,
            num_stages=tile.stages, **sizes, **products,
        )  # fmt: skip
        answer[places, HV](
            qkvz, weights.norm, out, starts, slots, batch.seq_lens, block_size, mixed, u, totals, states_before,
            num_requests, weights.eps, qkvz.stride(0), out.stride(0), slots.stride(0), num_warps=self.warps, **sizes,
            **products,
        )  # fmt: skip

    @property
    def _registers(self) -> dict[str, int]:
        """With so many, three programs of :func:`.solve` run at once on a multiprocessor of an H200: 227 us become 195.

        Other GPUs' code spills with them.
        """
        return {"maxnreg": 168} if self.hopper and self.spec.dtype != torch.float32 else {}

    @property
    def _inverse(self) -> triton.language.dtype:
        """What the triangular system is inverted in: float16 has three more bits than bfloat16."""
        return triton.language.float32 if self.spec.dtype == torch.float32 else triton.language.float16
