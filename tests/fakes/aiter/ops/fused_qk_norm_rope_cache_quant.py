"""q/k norm, rope and the cache write in one launch, straight from packed qkv."""

import torch
from aiter import dtypes
from aiter._recorded import real
from aiter.ops.quant import narrowed


@real("aiter.fused_qk_norm_rope_cache_pts_quant_shuffle")
def fused_qk_norm_rope_cache_pts_quant_shuffle(
    qkv,
    qw,
    kw,
    cos_sin,
    positions,
    num_tokens,
    num_heads_q,
    num_heads_k,
    num_heads_v,
    head_size,
    is_neox_style,
    eps,
    q_out,
    k_cache,
    v_cache,
    slot_mapping,
    per_tensor_k_scale,
    per_tensor_v_scale,
    k_out,
    v_out,
    return_kv,
    use_shuffle_layout,
    block_size,
    x,
    rotary_dim=0,
):
    for tensor in (qkv, qw, kw, cos_sin, slot_mapping, q_out):
        assert tensor.is_contiguous()
    assert qkv.dtype == qw.dtype == kw.dtype == cos_sin.dtype == q_out.dtype, "all are read as qkv's dtype"
    assert (k_out, v_out, return_kv) == (None, None, False)
    assert head_size in (64, 128, 256)
    assert block_size & (block_size - 1) == 0
    assert 0 < num_tokens <= len(slot_mapping)
    # A thread has a 64th of a head: what it rotates must have its partner in one other.
    of_thread, rotary_dim = head_size // 64, rotary_dim or head_size
    assert is_neox_style or of_thread > 1, "neighbours are in two threads, and are not rotated"
    assert not is_neox_style or rotary_dim // 2 % of_thread == 0
    fp8 = k_cache.dtype == dtypes.fp8
    assert fp8 or k_cache.dtype == qkv.dtype
    assert not fp8 or of_thread > 1, "numbers beyond what FP8 holds are not cut"
    for scale in (per_tensor_k_scale, per_tensor_v_scale):
        assert scale.device.type == "cpu", "it is read on the host"
        assert scale.dtype == torch.float32
    heads = qkv.view(-1, num_heads_q + num_heads_k + num_heads_v, head_size)[:num_tokens]
    q, k, v = heads.split([num_heads_q, num_heads_k, num_heads_v], 1)
    table = cos_sin.view(-1, rotary_dim)[positions[:num_tokens]].float()
    q_out[:num_tokens] = _turned(q, qw, eps, table, is_neox_style, rotary_dim)
    k = _turned(k, kw, eps, table, is_neox_style, rotary_dim)
    for token, slot in enumerate(slot_mapping[:num_tokens].tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for rows, side, scale, keys in (
            (k[token], k_cache, per_tensor_k_scale, True),
            (v[token], v_cache, per_tensor_v_scale, False),
        ):
            stored = narrowed(rows, scale, side.dtype).view(torch.uint8) if fp8 else rows
            raw = side.view(torch.uint8) if fp8 else side
            if not use_shuffle_layout:
                raw[block, offset] = stored
            elif keys:
                raw[block, :, :, offset] = stored.unflatten(-1, (-1, x))
            else:
                raw[block, :, offset // x, :, offset % x] = stored


def _turned(heads, weight, eps, table, halves, rotary_dim):
    wide = heads.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    wide = wide.to(heads.dtype).float()
    cos, sin = table[:, None].chunk(2, -1)
    turned, rest = wide[..., :rotary_dim], wide[..., rotary_dim:]
    if halves:
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        even, odd = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((turned, rest), -1).to(heads.dtype)
