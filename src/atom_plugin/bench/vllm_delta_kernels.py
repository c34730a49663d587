"""vLLM's own kernels of Gated DeltaNet, called as its Qwen models call them, for comparison.

As :mod:`atom_plugin.bench.vllm_kernels`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from atom_core.cache import StateView
from atom_core.config import GatedDeltaNetConfig
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_plugin.bench.vllm_kernels import importing, leave_out_other_gpus

#: ``(qkvz, ba, weights, cache)`` to ``[T, Hv, V]``, of the shapes in :mod:`atom_core.kernels.gated_delta_net`. In this
#: module also from ``qkv [T, C]``, without the gated norm.
Rule = Callable[[torch.Tensor, torch.Tensor, GatedDeltaNetWeights, StateView], torch.Tensor]


def gated_delta_net(
    layer: GatedDeltaNetConfig, query_start_loc: torch.Tensor, slots: torch.Tensor, *, decodes: bool
) -> Rule:
    """Convolution, rule and gated norm of a layer. The rule of prompts is FlashInfer's, as on Hopper by default.

    Args:
        layer: the layer.
        query_start_loc: int32 ``[R + 1]``, where each request's tokens begin.
        slots: int32 ``[R]``, where each request's convolution inputs and state are.
        decodes: whether each request has one token and goes on from its state. Otherwise its prompt begins.
    """
    with importing("vLLM's Gated DeltaNet"):
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
        from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd
    rule = _decode(gdn, layer, slots) if decodes else _prefill(gdn, layer, query_start_loc, slots)

    def run(qkvz: torch.Tensor, ba: torch.Tensor, weights: GatedDeltaNetWeights, cache: StateView) -> torch.Tensor:
        qkv, z = torch.split(qkvz, [layer.channels, qkvz.shape[1] - layer.channels], -1)
        mixed = rule(qkv, ba, weights, cache)
        out = torch.empty_like(mixed)
        layer_norm_fwd(
            mixed.reshape(-1, layer.value_dim),
            weights.norm,
            None,
            weights.eps,
            z=z.reshape(-1, layer.value_dim),
            out=out.view(-1, layer.value_dim),
            group_size=layer.value_dim,
            norm_before_gate=True,
            is_rms_norm=True,
            activation="silu",
        )
        return out

    return run


def _decode(gdn: Any, layer: GatedDeltaNetConfig, slots: torch.Tensor) -> Rule:
    """Of one token a request; ``gdn``: vLLM's module."""

    def run(qkv: torch.Tensor, ba: torch.Tensor, weights: GatedDeltaNetWeights, cache: StateView) -> torch.Tensor:
        conv, states = cache.tensors
        b, a = (it.contiguous() for it in ba.chunk(2, -1))
        mixed = gdn.causal_conv1d_update(
            qkv,
            conv.transpose(-1, -2),
            weights.conv,
            None,
            "silu",
            conv_state_indices=slots,
            validate_data=False,
            # vLLM's model writes over its input, which is needed again here.
            out=torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device),
        )
        out = qkv.new_empty(len(qkv), 1, layer.num_value_heads, layer.value_dim)
        gdn.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed,
            a=a,
            b=b,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            scale=layer.key_dim**-0.5,
            initial_state=states,
            out=out,
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )
        return out.squeeze(1)

    return run


def _prefill(gdn: Any, layer: GatedDeltaNetConfig, query_start_loc: torch.Tensor, slots: torch.Tensor) -> Rule:
    """Of prompts from their first token on; ``gdn``: vLLM's module."""
    leave_out_other_gpus("vLLM's prompts go through FlashInfer by default on Hopper alone")
    with importing("vLLM's Gated DeltaNet"):
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata
    with importing("FlashInfer's Gated DeltaNet"):
        importlib.import_module("flashinfer.gdn_prefill")  # vLLM imports it in the call
    names = "nums_dict", "batch_ptr", "token_chunk_offset_ptr"
    computed = compute_causal_conv1d_metadata(query_start_loc.cpu(), device=query_start_loc.device)
    metadata = SimpleNamespace(**dict(zip(names, computed, strict=True)))
    has_state = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    rows = slots.long()

    def run(qkv: torch.Tensor, ba: torch.Tensor, weights: GatedDeltaNetWeights, cache: StateView) -> torch.Tensor:
        conv, states = cache.tensors
        b, a = (it.contiguous() for it in ba.chunk(2, -1))
        mixed = gdn.causal_conv1d_fn(
            qkv.transpose(0, 1),
            weights.conv,
            None,
            activation="silu",
            conv_states=conv.transpose(-1, -2),
            has_initial_state=has_state,
            cache_indices=slots,
            query_start_loc=query_start_loc,
            metadata=metadata,
        ).transpose(0, 1)
        q, k, v, g, beta = gdn.fused_post_conv_prep(
            conv_output=mixed,
            a=a,
            b=b,
            A_log=weights.a_log,
            dt_bias=weights.dt_bias,
            num_k_heads=layer.num_key_heads,
            head_k_dim=layer.key_dim,
            head_v_dim=layer.value_dim,
            apply_l2norm=True,
            output_g_exp=False,
        )
        out, last = gdn.fi_chunk_gated_delta_rule(
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            initial_state=states[rows].zero_(),
            output_final_state=True,
            cu_seqlens=query_start_loc,
            use_qk_l2norm_in_kernel=False,
        )
        states[rows] = last.to(states.dtype)
        squeezed: torch.Tensor = out.squeeze(0)
        return squeezed

    return run
