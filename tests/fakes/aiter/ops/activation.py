"""Gated activations: the gate is the first half of a row, and rows follow each other without a gap."""

import torch
import torch.nn.functional as F
from aiter._recorded import real


@real("aiter.silu_and_mul")
def silu_and_mul(out, input, limit=0.0):
    gate, up = _halves(out, input)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(F.silu(gate) * up)


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


def _halves(out, input):
    assert input.dtype == out.dtype
    assert input.dtype in (torch.bfloat16, torch.float16)
    assert out.shape == (*input.shape[:-1], input.shape[-1] // 2)
    # Pointers alone are looked at: what a stride says is not.
    assert input.is_contiguous()
    assert out.is_contiguous()
    assert input.shape[0] > 0, "a launch of no programs"
    return input.float().chunk(2, dim=-1)
