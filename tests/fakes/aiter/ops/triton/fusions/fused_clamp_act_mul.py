"""A gated activation that quantises, a program a row, which it has whole."""

import torch
import torch.nn.functional as F
from aiter import dtypes
from aiter._recorded import real
from aiter.ops.quant import largest, narrowed


@real("aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul")
def fused_clamp_act_mul(
    inp,
    out=None,
    scale=None,
    swiglu_limit=0,
    activation="silu",
    weights=None,
    dtype_quant=None,
    transpose_scale=False,
    quant_block_size=128,
    scale_dtype_fmt="fp32",
    shuffle_scale=False,
):
    assert (weights, scale_dtype_fmt, shuffle_scale) == (None, "fp32", False)
    assert swiglu_limit <= 0
    assert dtype_quant is not None
    assert dtype_quant == out.dtype == dtypes.fp8, "this GPU multiplies another form of FP8"
    rows, size = inp.shape[0], inp.shape[1] // 2
    assert rows > 0, "a launch of no programs"
    assert out.shape == (rows, size)
    assert size >= 128
    assert size % 128 == 0
    # Blocks of Triton's, of which a row is a whole number once it is filled up with zeros.
    padded = 1 << (size - 1).bit_length()
    assert quant_block_size.bit_count() == 1
    assert padded % quant_block_size == 0
    groups = -(-size // quant_block_size)
    assert scale.dtype == torch.float32
    assert scale.shape == ((groups, rows) if transpose_scale else (rows, groups))
    gate, up = inp.float().chunk(2, dim=-1)
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]
    activated = F.pad(act(gate) * up, (0, padded - size)).view(rows, -1, quant_block_size)
    found = largest(activated).clamp_min(1e-10) / torch.finfo(out.dtype).max
    out.copy_(narrowed(activated, found[..., None], out.dtype).view(rows, padded)[:, :size])
    found = found[:, :groups]
    scale.copy_(found.t() if transpose_scale else found)
    return out, scale.view(rows, groups)
