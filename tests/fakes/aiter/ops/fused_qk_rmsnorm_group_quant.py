"""Norms that quantise: nothing is rounded on the way, neither the sum that is normed nor the norm; see aiter's .cu."""

import torch
from aiter import dtypes
from aiter._recorded import real
from aiter.ops.quant import largest, narrowed


@real("aiter.fused_qk_rmsnorm_group_quant")
def fused_qk_rmsnorm_group_quant(
    q_out_quantized=None,
    q_out_scale=None,
    q=None,
    q_weight=None,
    q_epsilon=1e-6,
    q_out_unquantized=None,
    k_out=None,
    q_res_out=None,
    k=None,
    k_weight=None,
    k_epsilon=None,
    q_residual=None,
    group_size=128,
    transpose_scale=False,
    gemma_norm=False,
):
    _one_input(q_out_unquantized, k_out, k, k_weight, k_epsilon, gemma_norm)
    rows, size = q.shape
    # A thread has 4, 8 or 16 numbers of a row.
    assert group_size in (32, 64, 128)
    assert size % group_size == 0
    normed = _normed(q, q_weight, q_epsilon, q_residual, q_res_out).view(-1, group_size)
    scale = _quantize(normed, q_out_quantized)
    assert q_out_scale.dtype == torch.float32
    assert q_out_scale.shape == (rows, size // group_size)
    by_row = scale.view(rows, -1)
    if not transpose_scale:
        assert q_out_scale.stride(1) == 1
        q_out_scale.copy_(by_row)
    elif q_out_scale.stride() == (1, rows):
        q_out_scale.copy_(by_row)
    else:
        # The shape does not follow the bytes.
        assert q_out_scale.is_contiguous()
        q_out_scale.view(-1).copy_(by_row.t().flatten())


@real("aiter.fused_qk_rmsnorm_per_token_quant")
def fused_qk_rmsnorm_per_token_quant(
    q_out_quantized,
    q_out_scale,
    q,
    q_weight,
    q_epsilon,
    q_out_unquantized=None,
    k_out=None,
    q_res_out=None,
    k=None,
    k_weight=None,
    k_epsilon=None,
    q_residual=None,
    gemma_norm=False,
):
    _one_input(q_out_unquantized, k_out, k, k_weight, k_epsilon, gemma_norm)
    assert q_out_scale.dtype == torch.float32
    assert q_out_scale.shape == (len(q), 1)
    q_out_scale.copy_(_quantize(_normed(q, q_weight, q_epsilon, q_residual, q_res_out), q_out_quantized)[:, None])


def _one_input(*others):
    assert others == (None, None, None, None, None, False), "more than one norm is not asked for"


def _normed(x, weight, epsilon, residual, residual_out):
    assert x.dtype == weight.dtype
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert weight.shape == (x.shape[1],)
    assert weight.is_contiguous()
    assert x.shape[1] <= 8192, "it is refused"
    assert x.shape[0] > 0, "a launch of no programs"
    for tensor in (x, residual, residual_out):
        if tensor is not None:
            assert (tensor.shape, tensor.dtype) == (x.shape, x.dtype)
            assert tensor.stride(1) == 1
            assert tensor.stride(0) >= x.shape[1]
    wide = x.float()
    if residual is not None:
        assert residual_out is not None
        wide = wide + residual.float()
        residual_out.copy_(wide)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def _quantize(groups, out):
    assert out.dtype == dtypes.fp8, f"{out.dtype} is not what this GPU multiplies as FP8"
    assert out.is_contiguous()
    assert out.numel() == groups.numel()
    scale = largest(groups).clamp_min(1e-10) / torch.finfo(out.dtype).max
    out.view(groups.shape).copy_(narrowed(groups, scale[:, None], out.dtype))
    return scale
