"""Norms: rows may have a stride, the weight has the input's dtype."""

import torch
from aiter._recorded import real


@real("aiter.rms_norm")
def rms_norm(input, weight, epsilon, use_model_sensitive_rmsnorm=0):
    assert use_model_sensitive_rmsnorm == 0, "the variant that rounds like T5 is not one that we ask for"
    return _norm(input, weight, epsilon)


@real("aiter.rmsnorm2d_fwd_with_add")
def rmsnorm2d_fwd_with_add(
    out, input, residual_in, residual_out, weight, epsilon, gemma_norm=False, use_model_sensitive_rmsnorm=0
):
    assert use_model_sensitive_rmsnorm == 0
    assert out.shape == residual_in.shape == residual_out.shape == input.shape
    # What is normed is not rounded.
    summed = input.float() + residual_in.float()
    residual_out.copy_(summed)
    out.copy_(_norm(input, weight + 1 if gemma_norm else weight, epsilon, summed))


def _norm(x, weight, epsilon, summed=None):
    assert x.dim() == 2
    assert x.dtype == weight.dtype
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert x.shape[-1] <= 8192, "another, slower kernel of aiter's"
    assert x.shape[0] > 0, "a launch of no programs"
    wide = x.float() if summed is None else summed
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)
