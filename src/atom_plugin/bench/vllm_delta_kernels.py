"""vLLM's own kernels of Gated DeltaNet, called as its Qwen models call them, for comparison.

As :mod:`atom_plugin.bench.vllm_kernels`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import torch

from atom_core.config import GatedDeltaNetConfig
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_plugin.bench.vllm_kernels import Unavailable, importing

#: ``(qkvz [T, channels + values], ba [T, 2 heads], weights, convolution inputs, states)`` to ``[T, heads, value dim]``.
Rule = Callable[[torch.Tensor, torch.Tensor, GatedDeltaNetWeights, torch.Tensor, torch.Tensor], torch.Tensor]


def gated_delta_net(layer: GatedDeltaNetConfig, starts: torch.Tensor, slots: torch.Tensor, *, decodes: bool) -> Rule:
    """Convolution, rule and gated norm of a layer. The rule of prompts is FlashInfer's, as on Hopper by default.

    Args:
        layer: the layer.
        starts: int32 ``[R + 1]``, where each request's tokens begin.
        slots: int32 ``[R]``, where each request's convolution inputs and state are.
        decodes: whether each request has one token and goes on from its state. Otherwise its prompt begins.
    """
    with importing("vLLM's Gated DeltaNet"):
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
        from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata
    if not decodes:
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            raise Unavailable("vLLM's prompts go through FlashInfer by default on Hopper alone")
        with importing("FlashInfer's Gated DeltaNet"):
            importlib.import_module("flashinfer.gdn_prefill")  # vLLM imports it in the call
    device = starts.device
    nums, of_programs, chunks = compute_causal_conv1d_metadata(starts.cpu(), device=device)
    of_conv = SimpleNamespace(nums_dict=nums, batch_ptr=of_programs, token_chunk_offset_ptr=chunks)
    begin = torch.zeros(len(slots), dtype=torch.bool, device=device)
    states_of = slots.long()

    def decode(
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: GatedDeltaNetWeights,
        conv: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        mixed = gdn.causal_conv1d_update(
            qkv,
            conv.transpose(-1, -2),
            weights.conv,
            None,
            "silu",
            conv_state_indices=slots,
            validate_data=False,
            # vLLM's model writes over its input, which is needed again here.
            out=torch.empty(qkv.shape, dtype=qkv.dtype, device=device),
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

    def prefill(
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: GatedDeltaNetWeights,
        conv: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        mixed = gdn.causal_conv1d_fn(
            qkv.transpose(0, 1),
            weights.conv,
            None,
            activation="silu",
            conv_states=conv.transpose(-1, -2),
            has_initial_state=begin,
            cache_indices=slots,
            query_start_loc=starts,
            metadata=of_conv,
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
            initial_state=states[states_of].zero_(),
            output_final_state=True,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=False,
        )
        states[states_of] = last.to(states.dtype)
        found: torch.Tensor = out.squeeze(0)
        return found

    def run(
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        weights: GatedDeltaNetWeights,
        conv: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        qkv, z = torch.split(qkvz, [layer.channels, qkvz.shape[1] - layer.channels], -1)
        b, a = ba.chunk(2, -1)
        found = (decode if decodes else prefill)(qkv, b.contiguous(), a.contiguous(), weights, conv, states)
        normed = torch.empty_like(found)
        layer_norm_fwd(
            found.reshape(-1, layer.value_dim),
            weights.norm,
            None,
            weights.eps,
            z=z.reshape(-1, layer.value_dim),
            out=normed.view(-1, layer.value_dim),
            group_size=layer.value_dim,
            norm_before_gate=True,
            is_rms_norm=True,
            activation="silu",
        )
        return normed

    return run
