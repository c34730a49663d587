"""Gated activations: the gate is the first half of a row, and rows follow each other without a gap."""

import torch
import torch.nn.functional as F
from aiter import dtypes
from aiter._recorded import real
from aiter.ops.quant import largest, narrowed


@real("aiter.silu_and_mul")
def silu_and_mul(out, input, limit=0.0):
    gate, up = _halves(out, input)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(F.silu(gate) * up)


@real("aiter.silu_and_mul_quant")
def silu_and_mul_quant(out, input, scale, group_size, limit=0.0, shuffle_scale=False):
    assert out.dtype == dtypes.fp8, f"{out.dtype} is not what this GPU multiplies as FP8"
    rows, size = out.shape
    assert size <= 8192, "it is refused"
    assert size % group_size == 0
    each = next(each for most, each in ((2048, 8), (4096, 16), (6144, 24), (8192, 32)) if size <= most)
    assert group_size % each == 0, "threads do not share out a group: scales are wrong, and nobody says so"
    gate, up = _halves(out, input, out.dtype)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    groups = (F.silu(gate) * up).view(-1, group_size)
    found = largest(groups).clamp_min(1e-10) / torch.finfo(out.dtype).max
    out.copy_(narrowed(groups, found[:, None], out.dtype).view(out.shape))
    # Bytes are written, whatever the shape says.
    assert scale.dtype == torch.float32
    assert scale.numel() == found.numel()
    assert scale.is_contiguous()
    by_row = found.view(rows, -1)
    scale.view(-1).copy_((by_row.t() if shuffle_scale else by_row).flatten())


@real("aiter.gelu_and_mul")
def gelu_and_mul(out, input):
    gate, up = _halves(out, input)
    out.copy_(F.gelu(gate) * up)


@real("aiter.gelu_tanh_and_mul")
def gelu_tanh_and_mul(out, input):
    gate, up = _halves(out, input)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


@real("aiter.swiglu_and_mul")
def swiglu_and_mul(out, input):
    gate, up = _halves(out, input)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    out.copy_(gate * torch.sigmoid(1.702 * gate) * (up + 1))


def _halves(out, input, dtype=None):
    assert out.dtype == (dtype or input.dtype)
    assert input.dtype in (torch.bfloat16, torch.float16)
    assert out.shape == (*input.shape[:-1], input.shape[-1] // 2)
    # Pointers alone are looked at: what a stride says is not.
    assert input.is_contiguous()
    assert out.is_contiguous()
    assert input.shape[0] > 0, "a launch of no programs"
    return input.float().chunk(2, dim=-1)
