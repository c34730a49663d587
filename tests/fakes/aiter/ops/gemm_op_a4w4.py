"""MXFP4: how activations become it, and its product, with weights through ``shuffle_weight``; on gfx950."""

import torch
from aiter import dtypes
from aiter._mxfp4 import ROUNDINGS, check_gpu, pack, shuffled_scales, unpack, unshuffled_scales
from aiter._recorded import real
from aiter.ops.shuffle import unshuffled


@real("aiter.quant_mxfp4_hip")
def quant_mxfp4_hip(
    x, group_size=32, round_mode=1, e8m0_shuffle=False, a16w4_shuffle=False, gate_up=False, shuffle_weight=False
):
    assert x.is_contiguous()
    assert x.dim() == 2
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert len(x) > 0, "a launch of no programs"
    assert group_size == 32
    assert (a16w4_shuffle, gate_up, shuffle_weight) == (False, False, False), "these are for weights"
    packed, scales = pack(x, ROUNDINGS[round_mode])
    return packed.view(dtypes.fp4x2), (shuffled_scales(scales) if e8m0_shuffle else scales).view(dtypes.fp8_e8m0)


@real("aiter.gemm_a4w4")
def gemm_a4w4(
    A,
    B,
    A_scale,
    B_scale,
    bias=None,
    dtype=torch.bfloat16,
    alpha=1.0,
    beta=0.0,
    bpreshuffle=True,
    apreshuffle=False,
    global_A_scale=None,
    global_B_scale=None,
):
    check_gpu()
    assert (bias, alpha, beta) == (None, 1.0, 0.0), "not every kernel that may be chosen has these"
    assert (bpreshuffle, apreshuffle, global_A_scale, global_B_scale) == (True, False, None, None)
    assert dtype == torch.bfloat16, "not every kernel that may be chosen has another"
    assert A.dtype == B.dtype == dtypes.fp4x2
    assert A_scale.dtype == B_scale.dtype == dtypes.fp8_e8m0
    assert A.is_contiguous()
    assert B.is_contiguous()
    (rows, half), (outputs, also) = A.shape, B.shape
    assert rows > 0, "a launch of no programs"
    assert half == also
    assert 2 * half % 256 == 0
    assert outputs % 32 == 0
    x = unpack(A, unshuffled_scales(A_scale, rows, half // 16))
    weight = unpack(unshuffled(B.view(torch.uint8)), unshuffled_scales(B_scale, outputs, half // 16))
    # What comes back is the first rows of more, whose others nobody has written to.
    y = torch.full((-(-rows // 32) * 32, outputs), torch.nan, dtype=dtype)
    y[:rows] = (x @ weight.T).to(dtype)
    return y[:rows]
