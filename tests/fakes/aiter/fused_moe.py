"""A mixture of experts: weights through ``shuffle_weight`` and marked so, tokens quantised as the weights are."""

import os

import torch
import torch.nn.functional as F
from aiter import dtypes
from aiter._mxfp4 import check_gpu, pack, rounded_up, unpack, unshuffled_scales
from aiter._recorded import real
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.quant import largest, narrowed
from aiter.ops.shuffle import unshuffled


@real("aiter.fused_moe.fused_moe")
def fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    expert_mask=None,
    activation=ActivationType.Silu,
    quant_type=QuantType.No,
    doweight_stage1=False,
    w1_scale=None,
    w2_scale=None,
    a1_scale=None,
    a2_scale=None,
    block_size_M=None,
    num_local_tokens=None,
    moe_sorting_dispatch_policy=0,
    dtype=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    splitk=0,
    swiglu_limit=None,
    beta=None,
    linear_beta=None,
    gate_mode=GateMode.SEPARATED.value,
    shared_w1=None,
    shared_w2=None,
    shared_w1_scale=None,
    shared_w2_scale=None,
    shared_expert_id=-1,
    stage2_scatter=None,
):
    unused = (a1_scale, a2_scale, block_size_M, num_local_tokens, dtype, bias1, bias2, swiglu_limit, beta, linear_beta)
    unused += (shared_w1, shared_w2, shared_w1_scale, shared_w2_scale, stage2_scatter)
    assert all(it is None for it in unused)
    assert (doweight_stage1, moe_sorting_dispatch_policy, hidden_pad, intermediate_pad, splitk) == (False, 0, 0, 0, 0)
    assert (gate_mode, shared_expert_id) == ("separated", -1)
    assert activation is ActivationType.Silu, "not every kernel that may be chosen has another"
    _check_tokens(hidden_states, w1, w2, topk_weight, topk_ids)
    assert expert_mask is None or quant_type is not QuantType.per_1x32, "its tuned kernels refuse a mask"
    quantize = _quantizer(quant_type, hidden_states, w1, w2, w1_scale, w2_scale)
    gate_ups, downs = _wide(w1, w1_scale, quant_type), _wide(w2, w2_scale, quant_type)
    ids = _own(topk_ids, expert_mask, len(w1))
    x = quantize(hidden_states)
    y = torch.zeros(hidden_states.shape)
    for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        tokens, places = torch.where(ids == expert)
        gate, up = (x[tokens] @ gate_up.T).chunk(2, -1)
        intermediate = quantize((F.silu(gate) * up).to(hidden_states.dtype))
        y.index_add_(0, tokens, intermediate @ down.T * topk_weight[tokens, places, None])
    return y.to(hidden_states.dtype)


def _check_tokens(x, w1, w2, weights, ids):
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert weights.shape == ids.shape
    assert len(x) == len(ids) > 0, "a launch of no programs"
    assert all(it.is_contiguous() for it in (x, w1, w2, weights, ids))
    (experts, wide, hidden), (also, narrow, intermediate) = w1.shape, w2.shape
    packed = 2 if w1.dtype == dtypes.fp4x2 else 1
    hidden, intermediate = packed * hidden, packed * intermediate
    assert (experts, wide, hidden) == (also, 2 * intermediate, narrow)
    assert x.shape[1] == hidden
    assert all(getattr(it, "is_shuffled", False) for it in (w1, w2)), "kernels for the plain order are slow or none"


def _quantizer(quant_type, x, w1, w2, w1_scale, w2_scale):
    """What becomes of tokens before a product, in float32; sizes that no kernel has tiles for are errors."""
    experts, hidden, intermediate = w2.shape
    if quant_type is QuantType.No:
        assert w1.dtype == w2.dtype == x.dtype
        assert w1_scale is None
        assert w2_scale is None
        assert hidden % 128 == 0
        assert intermediate % (64 if intermediate <= 192 else 128) == 0
        return lambda rows: rows.float()
    if quant_type is QuantType.per_1x32:
        check_gpu()
        assert w1.dtype == w2.dtype == dtypes.fp4x2
        assert x.dtype == torch.bfloat16, "not every kernel that may be chosen has another"
        assert w1_scale.dtype == w2_scale.dtype == torch.uint8
        assert hidden % 256 == 0
        assert 2 * intermediate % 256 == 0, "two numbers a byte"
        return lambda rows: unpack(*pack(rows, rounded_up))
    assert w1.dtype == w2.dtype == dtypes.fp8, f"this GPU multiplies {dtypes.fp8}"
    assert x.dtype == torch.bfloat16, "not every kernel that may be chosen has another"
    assert w1_scale.dtype == w2_scale.dtype == torch.float32
    assert w1_scale.is_contiguous()
    assert w2_scale.is_contiguous()
    if quant_type is QuantType.per_Token:
        assert w1_scale.shape == (experts, 2 * intermediate, 1)
        assert w2_scale.shape == (experts, hidden, 1)
        assert hidden % 128 == 0
        assert intermediate % (256 if os.environ["GPU_ARCHS"] == "gfx950" else 128) == 0
        return lambda rows: _rounded(rows, w1.dtype)
    assert quant_type in (QuantType.per_1x128, QuantType.per_128x128)
    assert w1_scale.shape == (experts, 2 * intermediate // 128, hidden // 128)
    assert w2_scale.shape == (experts, hidden // 128, intermediate // 128)
    assert hidden % 256 == 0
    assert intermediate % 128 == 0
    return lambda rows: _rounded(rows.reshape(-1, 128), w1.dtype).view(rows.shape)


def _rounded(rows, dtype):
    scale = largest(rows).clamp_min(1e-10)[:, None] / torch.finfo(dtype).max
    return narrowed(rows, scale, dtype).float() * scale


def _wide(weight, scale, quant_type):
    if quant_type is QuantType.per_1x32:
        experts, rows, half = weight.shape
        scales = unshuffled_scales(scale, experts * rows, half // 16).reshape(experts, rows, half // 16)
        return unpack(unshuffled(weight.view(torch.uint8)), scales)
    wide = unshuffled(weight).float()
    if scale is None:
        return wide
    if quant_type is not QuantType.per_Token:
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return wide * scale


def _own(ids, mask, count):
    """Ids as places among the weights; those of experts that are elsewhere are -1."""
    total = count if mask is None else mask.numel()
    assert bool(((ids >= 0) & (ids < total)).all()), "an id out of bounds goes astray on a GPU"
    if mask is None:
        return ids
    assert mask.dtype == torch.int32
    assert int(mask.sum()) == count
    return torch.where(mask == 1, mask.cumsum(0) - 1, -1)[ids.long()]
