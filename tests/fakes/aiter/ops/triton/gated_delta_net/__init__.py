"""Gated DeltaNet of prompts in Triton: the convolution, and the rule in chunks, with states ``[.., V, K]``."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from aiter._recorded import real

#: Tokens of a request that one program of the convolution takes.
_TOKENS = 8


@dataclass
class GatedDeltaRulePrefillMetadata:
    """For the very tensor that it was built with."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    chunk_size: int


@real("aiter.ops.triton.gated_delta_net.build_gated_delta_rule_prefill_metadata")
def build_gated_delta_rule_prefill_metadata(
    seq_lens_cpu, *, cu_seqlens, chunk_size=64, num_decodes=0, num_decode_tokens=0
):
    assert (num_decodes, num_decode_tokens) == (0, 0), "we give it prompts alone"
    lengths = tuple(map(int, seq_lens_cpu))
    assert lengths, "at least one"
    if list(accumulate(lengths, initial=0)) != cu_seqlens.tolist():
        raise ValueError("`seq_lens_cpu` does not match the cumulative sequence lengths.")
    return GatedDeltaRulePrefillMetadata(lengths, cu_seqlens, chunk_size)


@real("aiter.ops.triton.gated_delta_net.causal_conv1d_split_qkv_triton_fn")
def causal_conv1d_split_qkv_triton_fn(
    x,
    weight,
    bias,
    conv_states,
    query_start_loc,
    seq_lens_cpu,
    k_dim,
    v_dim,
    cache_indices=None,
    has_initial_state=None,
    activation="silu",
    pad_slot_id=-1,
):
    (dim, tokens), (channels, width) = x.shape, weight.shape
    assert bias is None, "we have none"
    assert dim == channels == 2 * k_dim + v_dim
    assert x.dtype == conv_states.dtype, "a loop's variables, which are first the one and then the other"
    assert conv_states.shape[1] == dim
    assert conv_states.shape[2] >= width - 1
    assert cache_indices.is_contiguous()
    assert has_initial_state.is_contiguous()
    out = x.new_full((tokens, dim), float("nan"))
    computed = -(-max(seq_lens_cpu) // _TOKENS) * _TOKENS
    for sequence in range(len(seq_lens_cpu)):
        begin, end = query_start_loc[sequence : sequence + 2].tolist()
        line = int(cache_indices[sequence])
        # It does not tell the two apart.
        if begin == end or pad_slot_id in (line, sequence):
            continue
        assert 0 <= line < len(conv_states)
        state = conv_states[line, :, : width - 1]
        before = state.clone() if has_initial_state[sequence] else torch.zeros_like(state)
        seen = torch.cat((before, x[:, begin:end]), 1)
        # Two factors of 16 bits have a product of 16 bits; sums have 32.
        mixed = sum((seen[:, tap : tap + end - begin] * weight[:, tap, None]).float() for tap in range(width))
        mixed = mixed * mixed.sigmoid() if activation in ("silu", "swish") else mixed
        out[begin : min(end, begin + computed)] = mixed[:, :computed].t().to(out.dtype)
        state.copy_(seen[:, end - begin :])
    return tuple(part.contiguous() for part in out.split([k_dim, k_dim, v_dim], 1))


@real("aiter.ops.triton.gated_delta_net.chunk_gated_delta_rule_opt_vk")
def chunk_gated_delta_rule_opt_vk(
    q,
    k,
    v,
    o=None,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    use_chunk_hip=False,
    use_chunk_flydsl=False,
    use_prepare_flydsl=False,
    state_dtype=None,
    use_exp2=True,
    num_decodes=0,
    num_decode_tokens=0,
    seq_lens_cpu=None,
    prefill_metadata=None,
    initial_state_indices=None,
    inplace_final_state=None,
    snapshot_dtype=None,
):
    assert (use_chunk_hip, use_chunk_flydsl, use_prepare_flydsl) == (False,) * 3, "kernels that we do not ask for"
    assert (num_decodes, num_decode_tokens, initial_state_indices, inplace_final_state) == (0, 0, None, None)
    assert (o, seq_lens_cpu, snapshot_dtype) == (None, None, None)
    assert use_exp2
    (batch, tokens, key_heads, size), heads = q.shape, v.shape[2]
    assert batch == 1, "requests lie behind one another"
    assert k.shape == q.shape
    assert q.dtype == k.dtype == v.dtype
    assert g.shape == beta.shape == (1, tokens, heads)
    # Strides are worked out of shapes.
    assert all(it.is_contiguous() for it in (q, k, v, g, beta, initial_state))
    if prefill_metadata.cu_seqlens is not cu_seqlens:
        raise ValueError("Prefill metadata is bound to the exact sequence-offset tensor used to build it")
    if prefill_metadata.chunk_size != 64:
        raise ValueError("The GDR metadata was built with another chunk_size")
    lengths = prefill_metadata.lengths
    if sum(lengths) != tokens:
        raise ValueError(f"The GDR metadata describes {sum(lengths)} prefill tokens, expected {tokens}.")
    if initial_state.shape[0] != len(lengths):
        raise ValueError("The number of initial states is expected to be equal to the number of input sequences")
    if state_dtype is not None and initial_state.dtype != state_dtype:
        raise ValueError("`initial_state.dtype` must match `state_dtype`.")
    assert state_dtype in (None, torch.float32, torch.bfloat16)
    if use_qk_l2norm_in_kernel:
        q, k = (it * torch.rsqrt(it.float().square().sum(-1, keepdim=True) + 1e-6) for it in (q, k))
        q, k = q.to(v.dtype), k.to(v.dtype)
    scale = size**-0.5 if scale is None else scale
    queries, keys = (it[0].float().repeat_interleave(heads // key_heads, 1) for it in (q, k))
    values = torch.full(v.shape, float("nan"), dtype=v.dtype)
    after = initial_state.new_empty(initial_state.shape, dtype=state_dtype or torch.float32)
    begin = 0
    for sequence, count in enumerate(lengths):
        state = initial_state[sequence].float()
        for token in range(begin, begin + count):
            key = keys[token][:, None]
            state = state * g[0, token].exp()[:, None, None]
            wanted = beta[0, token, :, None] * (v[0, token].float() - (state * key).sum(-1))
            state = state + wanted[..., None] * key
            values[0, token] = ((state * queries[token][:, None]).sum(-1) * scale).to(v.dtype)
        after[sequence] = state
        begin += count
    return values, after if output_final_state else None
