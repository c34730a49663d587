"""Gated DeltaNet (arXiv 2412.06464) between a layer's projections, over states that a framework keeps.

For each token, in order: a causal convolution of the last ``W`` inputs of q, k and v, then silu; the L2 norm of q and
k; and for each value head, with the decay ``exp(g)`` and the rate ``beta`` of the token,

    S = exp(g) S;  S = S + beta (v - S k) k^T;  o = S q;  y = rms_norm(o) * weight * silu(z)

``g = -exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``. Arithmetic is float32. ``Hk`` key heads of ``K``
elements, ``Hv`` value heads of ``V``; value head ``h`` uses key head ``h // (Hv / Hk)``. ``C = 2 Hk K + Hv V``.

``qkvz``: ``[T, C + Hv V]``, flat q, k, v, z. ``ba``: ``[T, 2 Hv]``, b then a. Rows of both may be strided. ``out``:
``[T, Hv, V]``. The cache has the convolution's inputs ``[slots, rows, C]``, of any strides and at least ``W - 1`` rows,
and the states ``[slots, Hv, V, K]``, float32 or bfloat16, together within a slot. :class:`atom_core.batch.States` says
which slots are read and written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.batch import Batch
from atom_core.cache import StateView
from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.gated_delta_net.reference import OneByOne, chunked_gated_delta_rule, gated_delta_rule
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.select import Implementation, Op, Target, always, only_on_cpu
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.types import GraphSupport

#: The widest convolution of Triton's kernels, and the longest keys and values.
_MAX_CONV_WIDTH, _MAX_DIM = 4, 128


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """One layer on this rank; see the module for the sizes."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    dtype: torch.dtype
    """Of activations."""
    state_dtype: torch.dtype

    @property
    def channels(self) -> int:
        """``C``."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class GatedDeltaNetKernel(Protocol):
    """The call, for any batch."""

    graph_support: GraphSupport

    def scratch_bytes(self, num_tokens: int, max_requests: int) -> int:
        """About what a call for so many tokens of prompts allocates and frees, for the engine's memory profiling.

        ``max_requests``: the most requests that they are shared among.
        """

    def __call__(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        cache: StateView,
        batch: Batch,
        out: torch.Tensor,
    ) -> None: ...


def _triton_supports(spec: GatedDeltaNetSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if not 2 <= spec.conv_width <= _MAX_CONV_WIDTH:
        return f"The Triton kernel has convolutions of 2 to {_MAX_CONV_WIDTH} tokens, not {spec.conv_width}."
    if max(spec.key_dim, spec.value_dim) > _MAX_DIM:
        sizes = f"{spec.key_dim} and {spec.value_dim}"
        return f"The Triton kernel has keys and values of sizes up to {_MAX_DIM}, not {sizes}."
    return None


def _build_triton(spec: GatedDeltaNetSpec, target: Target) -> GatedDeltaNetKernel:
    from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet  # needs triton

    nvidia, hopper = target.kind == "cuda", target.is_hopper
    return TritonGatedDeltaNet(spec, nvidia, overlaps(target), hopper)


def _aiter_supports(spec: GatedDeltaNetSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype != torch.bfloat16:
        return f"aiter's Gated DeltaNet is for bfloat16, not for {spec.dtype}."
    if (spec.key_dim, spec.value_dim) != (128, 128):
        return f"aiter's Gated DeltaNet has keys and values of 128, not of {spec.key_dim} and {spec.value_dim}."
    if not 2 <= spec.conv_width <= 4:
        return f"aiter's convolution is over 2 to 4 tokens, not over {spec.conv_width}."
    if spec.state_dtype not in (torch.float32, torch.bfloat16):
        return f"aiter's Gated DeltaNet has states in float32 and bfloat16, not in {spec.state_dtype}."
    return _triton_supports(spec, target)  # Triton runs the batches that aiter cannot


def _build_aiter(spec: GatedDeltaNetSpec, target: Target) -> GatedDeltaNetKernel:
    from atom_core.kernels.gated_delta_net.aiter_kernel import AiterGatedDeltaNet  # imports aiter when it is built

    return AiterGatedDeltaNet(spec, _build_triton(spec, target))


GATED_DELTA_NET: Op[GatedDeltaNetSpec, GatedDeltaNetKernel] = Op(
    "gated_delta_net",
    (
        Implementation(
            "aiter",
            _aiter_supports,
            _build_aiter,
            lambda target: "It runs prompts; decodes, drafts and prefix caches' copies of states are Triton's.",
        ),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("torch", only_on_cpu, lambda spec, target: OneByOne(chunked_gated_delta_rule)),
        Implementation("reference", always, lambda spec, target: OneByOne(gated_delta_rule)),
    ),
)
