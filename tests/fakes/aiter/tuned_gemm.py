"""Products in 16 bits. ``is_shuffled`` on a weight says in which order its bytes are."""

import torch
import torch.nn.functional as F
from aiter._recorded import real


@real("aiter.tuned_gemm.gemm_a16w16")
def gemm_a16w16(A, B, bias=None, otype=None, scale_a=None, scale_b=None, scale_c=None):
    assert not getattr(B, "is_shuffled", False), "this stands in for plain weights"
    assert (scale_a, scale_b, scale_c) == (None, None, None), "scales go with FP8"
    assert A.dtype == B.dtype
    assert A.dtype in (torch.bfloat16, torch.float16)
    assert A.numel() > 0, "a launch of no programs"
    y = F.linear(A.float(), B.float(), None if bias is None else bias.float())
    return y.to(otype or A.dtype)


@real("aiter.tuned_gemm.hipb_gemm")
def hipb_gemm(
    inp,
    weights,
    solidx,
    bias=None,
    otype=None,
    scale_a=None,
    scale_b=None,
    scale_c=None,
    bpreshuffle=False,
    config=None,
):
    assert solidx == -1, "the number of another kernel means something to one version of hipBLASLt"
    assert (bias, scale_a, scale_b, scale_c, bpreshuffle, config) == (None, None, None, None, False, None)
    assert inp.dtype == weights.dtype
    assert inp.dtype in (torch.bfloat16, torch.float16)
    assert inp.stride(1) == weights.stride(1) == 1
    assert inp.numel() > 0, "a launch of no programs"
    return F.linear(inp.float(), weights.float()).to(otype or inp.dtype)
