"""Gated DeltaNet of prompts by aiter's kernels in chunks of 64 tokens; Triton's run all other requests.

aiter has the convolution and the rule; the gates and the gated norm are ours. Its kernels take states that lie one
behind the other, and a framework's slots have gaps, so states are gathered, zeroed where a request has none, and
scattered. They neither keep states within a prompt nor begin at another input than the first, so Triton's run

- requests that decode, in one launch where this would be eight,
- whole steps in which drafts are verified or were accepted, or states are copied for a prefix cache,
- captured graphs,
- and whole steps of a cache that keeps the convolution's inputs in another dtype than activations have.

aiter wants to know on the host how many tokens each request has. Where the framework does not say, the first layer of a
step waits for the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from atom_core.batch import Batch, BatchShape, capturing
from atom_core.cache import StateView
from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.compile_keys import attention_keys, specialized
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.gated_delta_net import GatedDeltaNetKernel, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.gates_and_norm import compute_gates, norm_and_gate
from atom_core.kernels.gated_delta_net.reference import CHUNK
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.types import GraphSupport

#: Up to so many chunks in a step, aiter solves the triangular systems and multiplies by the results in one kernel.
_FUSED_CHUNKS = 32


@dataclass(frozen=True, eq=False)
class _Prompts:
    """The requests of a step that aiter runs, for all layers; padded requests are not among them."""

    lengths: list[int]
    starts: torch.Tensor
    """int32 ``[R + 1]``."""
    slots: torch.Tensor
    """int64 ``[R]``."""
    lines: torch.Tensor
    """int32 ``[R]``: as the slots, and -1 for slot 0."""
    has_state: torch.Tensor
    """bool ``[R]``."""
    new: torch.Tensor
    """bool ``[R, 1, 1, 1]``: the others."""
    real: torch.Tensor
    """bool ``[R, 1, 1, 1]``: those of another slot than 0."""
    metadata: Any
    """aiter's: which chunk is whose."""


class AiterGatedDeltaNet:
    """See :mod:`atom_core.kernels.gated_delta_net`.

    Args:
        spec: the layer.
        others: the kernel of what aiter's do not run, see the module.
    """

    def __init__(self, spec: GatedDeltaNetSpec, others: GatedDeltaNetKernel) -> None:
        require(
            "aiter.ops.triton.gated_delta_net.build_gated_delta_rule_prefill_metadata",
            "aiter.ops.triton.gated_delta_net.causal_conv1d_split_qkv_triton_fn",
            "aiter.ops.triton.gated_delta_net.chunk_gated_delta_rule_opt_vk",
        )
        self.spec, self.others = spec, others
        #: The other kernel runs captured graphs.
        self.graph_support: GraphSupport = others.graph_support

    def scratch_bytes(self, num_tokens: int, max_requests: int) -> int:
        """See :class:`atom_core.kernels.gated_delta_net.GatedDeltaNetKernel`: it has chunks of the same size."""
        return self.others.scratch_bytes(num_tokens, max_requests)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        yield from attention_keys(self.others, shape, device)
        prompts = [count for count in shape.queries if count > 1]
        if prompts:
            chunks = sum(-(-count // CHUNK) for count in prompts)
            yield "aiter", specialized(sum(prompts)), chunks > _FUSED_CHUNKS

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
        decodes, tokens = batch.num_decode_requests, batch.num_decode_tokens
        if decodes == batch.num_requests or not self.takes(cache, batch):
            self.others(qkvz, ba, weights, cache, batch, out)
            return
        prompts = batch
        if decodes:
            first, prompts = batch.decodes_and_others()
            self.others(qkvz[:tokens], ba[:tokens], weights, cache, first, out[:tokens])
        key = "aiter gated_delta_net"
        if key not in batch.scratch:
            batch.scratch[key] = _prompts(batch, prompts)
        found: _Prompts | None = batch.scratch[key]
        if found is not None:
            self._run(qkvz[tokens:], ba[tokens:], weights, cache, found, out[tokens:])

    def takes(self, cache: StateView, batch: Batch) -> bool:
        """Whether aiter runs the batch's prompts, see the module."""
        states = batch.states
        assert states is not None
        return (
            states.num_accepted is None
            and states.verifies is None
            and states.snapshots is None
            and cache.tensors[0].dtype == self.spec.dtype
            and not capturing(cache.tensors[0].device)
        )

    def _run(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        cache: StateView,
        prompts: _Prompts,
        out: torch.Tensor,
    ) -> None:
        spec, (conv, recurrent) = self.spec, cache.tensors
        tokens, channels = sum(prompts.lengths), spec.channels
        qkvz, ba, out = qkvz[:tokens], ba[:tokens], out[:tokens]
        q, k, v = _convolve(
            qkvz[:, :channels].t(),
            weights.conv,
            conv.transpose(1, 2),
            prompts.starts,
            prompts.lines,
            prompts.has_state,
            prompts.lengths,
            spec.num_key_heads * spec.key_dim,
            spec.num_value_heads * spec.value_dim,
        )
        g, beta = compute_gates(ba, weights.a_log, weights.dt_bias)
        before = recurrent[prompts.slots]
        values, after = _delta_rule(
            q.view(1, tokens, spec.num_key_heads, spec.key_dim),
            k.view(1, tokens, spec.num_key_heads, spec.key_dim),
            v.view(1, tokens, spec.num_value_heads, spec.value_dim),
            g.unsqueeze(0),
            beta.unsqueeze(0),
            before.masked_fill(prompts.new, 0.0),
            prompts,
        )
        # Slot 0 keeps what it has.
        recurrent.index_copy_(0, prompts.slots, torch.where(prompts.real, after, before))
        norm_and_gate(values[0], qkvz[:, channels:], weights.norm, weights.eps, out)


def _prompts(batch: Batch, prompts: Batch) -> _Prompts | None:
    """The requests of ``batch`` behind those that decode, which ``prompts`` has; None: they are all padded."""
    states = prompts.states
    assert states is not None
    starts = prompts.query_start_loc.tolist() if batch.host is None else batch.host.starts[batch.num_decode_requests :]
    lengths = [end - begin for begin, end in pairwise(starts)]
    while lengths and not lengths[-1]:
        lengths.pop()
    if not lengths:
        return None
    count = len(lengths)
    slots, boundaries = states.slots_of(prompts.seq_lens)[:count, 0], prompts.query_start_loc[: count + 1]
    has_state, real = prompts.seq_lens[:count] > boundaries.diff(), slots > 0
    return _Prompts(
        lengths=lengths,
        starts=boundaries,
        slots=slots.long(),
        lines=torch.where(real, slots, -1),
        has_state=has_state,
        new=~has_state.view(-1, 1, 1, 1),
        real=real.view(-1, 1, 1, 1),
        metadata=_metadata(lengths, boundaries),
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _metadata(lengths: list[int], starts: torch.Tensor) -> Any:
    """aiter's own, which every layer of the step is given with the same ``starts``."""
    return aiter_function("aiter.ops.triton.gated_delta_net.build_gated_delta_rule_prefill_metadata")(
        lengths, cu_seqlens=starts, chunk_size=CHUNK
    )


def _three(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv: torch.Tensor,
    starts: torch.Tensor,
    lines: torch.Tensor,
    has_state: torch.Tensor,
    lengths: Sequence[int],
    keys: int,
    values: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = x.shape[1]
    return x.new_empty(tokens, keys), x.new_empty(tokens, keys), x.new_empty(tokens, values)


@custom_op("aiter_gated_delta_net_convolution", _three, mutates=("conv",))
def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv: torch.Tensor,
    starts: torch.Tensor,
    lines: torch.Tensor,
    has_state: torch.Tensor,
    lengths: Sequence[int],
    keys: int,
    values: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = aiter_function("aiter.ops.triton.gated_delta_net.causal_conv1d_split_qkv_triton_fn")(
        x,
        weight,
        None,
        conv,
        starts,
        list(lengths),
        keys,
        values,
        cache_indices=lines,
        has_initial_state=has_state,
        activation="silu",
    )
    return q, k, v


# No custom op: those take no object such as aiter's metadata.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    prompts: _Prompts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[1, T, Hv, V]`` and states ``[R, Hv, V, K]``, of q and k that are not normed yet."""
    values, after = aiter_function("aiter.ops.triton.gated_delta_net.chunk_gated_delta_rule_opt_vk")(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=prompts.starts,
        state_dtype=states.dtype,
        prefill_metadata=prompts.metadata,
    )
    return values, after
