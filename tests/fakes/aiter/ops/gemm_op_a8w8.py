"""Products in FP8 with weights through ``shuffle_weight``."""

import torch
from aiter import dtypes
from aiter._recorded import real
from aiter.ops.shuffle import unshuffled


@real("aiter.gemm_a8w8_bpreshuffle")
def gemm_a8w8_bpreshuffle(XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, check=False):
    assert bias is None, "there is no bias here"
    _check(XQ, WQ, x_scale, w_scale, dtype)
    assert x_scale.shape == (XQ.shape[0], 1)
    assert w_scale.shape == (WQ.shape[0], 1)
    y = XQ.float() @ unshuffled(WQ).float().T
    return (y * x_scale * w_scale.view(1, -1)).to(dtype)


@real("aiter.gemm_a8w8_blockscale_bpreshuffle")
def gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, out=None):
    assert out is None
    _check(XQ, WQ, x_scale, w_scale, dtype)
    (rows, size), groups = XQ.shape, XQ.shape[1] // 128
    assert size % 128 == 0
    assert WQ.shape[0] % 64 == 0, "tiles have as many outputs, and are not cut"
    assert x_scale.shape == (rows, groups)
    assert w_scale.shape == (-(-WQ.shape[0] // 128), groups)
    # Bytes are read group by group, whatever the shape says.
    by_group = x_scale.flatten().view(groups, rows)
    weight = unshuffled(WQ).float() * w_scale.repeat_interleave(128, 0)[: WQ.shape[0]].repeat_interleave(128, 1)
    return ((XQ.float() * by_group.t().repeat_interleave(128, 1)) @ weight.T).to(dtype)


def _check(XQ, WQ, x_scale, w_scale, dtype):
    assert XQ.dtype == WQ.dtype == dtypes.fp8, f"this GPU multiplies {dtypes.fp8}"
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert dtype == torch.bfloat16, "not every kernel that may be chosen has another"
    assert XQ.is_contiguous()
    assert WQ.is_contiguous()
    assert x_scale.is_contiguous()
    assert w_scale.is_contiguous()
    assert XQ.shape[0] > 0, "a launch of no programs"
