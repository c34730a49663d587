"""Quantisers: into what the caller gave, whose dtype says which; a stored number times its scale is the true one."""

import torch
from aiter import dtypes
from aiter._recorded import real


@real("aiter.static_per_tensor_quant")
def static_per_tensor_quant(out, input, scale):
    _check(out, input)
    assert scale.numel() == 1
    out.copy_(narrowed(input, scale, out.dtype))


@real("aiter.dynamic_per_token_scaled_quant")
def dynamic_per_token_scaled_quant(
    out, input, scales, scale_ub=None, shuffle_scale=False, num_rows=None, num_rows_factor=1
):
    _check(out, input)
    assert (scale_ub, shuffle_scale, num_rows, num_rows_factor) == (None, False, None, 1)
    assert scales.numel() == input.shape[0]
    assert scales.is_contiguous()
    scale = largest(input) / torch.finfo(out.dtype).max
    scales.view(-1).copy_(scale)
    out.copy_(narrowed(input, scale[:, None], out.dtype))


@real("aiter.per_group_quant_hip")
def per_group_quant_hip(
    x,
    scale=None,
    quant_dtype=torch.int8,
    group_size=128,
    transpose_scale=False,
    num_rows=None,
    num_rows_factor=1,
    scale_type=torch.float32,
):
    assert (scale, num_rows, num_rows_factor, scale_type) == (None, None, 1, torch.float32)
    assert quant_dtype == dtypes.fp8, f"{quant_dtype} is not what this GPU multiplies as FP8"
    assert group_size == 128
    assert x.shape[-1] % group_size == 0
    assert x.is_contiguous(), "the rows of groups are a view"
    grouped = x.view(-1, group_size)
    found = largest(grouped).clamp_min(1e-10) / torch.finfo(quant_dtype).max
    quantized = narrowed(grouped, found[:, None], quant_dtype).view(x.shape)
    found = found.view(x.shape[0], -1)
    if transpose_scale:
        # The shape does not follow the bytes.
        found = found.t().contiguous().view(found.shape)
    return quantized, found


def largest(rows):
    """The largest magnitude of each row; NaN is nobody's."""
    return rows.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)


def narrowed(x, scale, dtype):
    """``x / scale`` in FP8, cut to what it holds; what is no number becomes the largest negative one."""
    limit = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).nan_to_num(nan=-limit).clamp(-limit, limit).to(dtype)


def _check(out, input):
    assert out.dtype == dtypes.fp8, f"{out.dtype} is not what this GPU multiplies as FP8"
    assert input.dtype in (torch.bfloat16, torch.float16)
    assert out.shape == input.shape
    assert input.is_contiguous()
    assert out.is_contiguous()
    assert input.shape[0] > 0, "a launch of no programs"
