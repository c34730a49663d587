"""MXFP4 in torch: four bits a number, two numbers a byte, and a power of two for each 32 of a row."""

import os

import torch

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def check_gpu():
    assert os.environ["GPU_ARCHS"] == "gfx950", "FP4 is multiplied there alone"


def rounded_up(x):
    """Exponents of groups of float32 ``[.., 32]``: 2 ** the exponent is the least by which none is more than 6."""
    return torch.ceil(torch.log2(x.abs().amax(-1).clamp_min(2.0**-120) / 6))


def rounded_to_even(x):
    """The largest magnitude, rounded to one bit after the first, has this exponent and 2."""
    largest = x.abs().amax(-1).clamp_min(2.0**-120)
    exponent = torch.floor(torch.log2(largest))
    return exponent + (largest >= 1.75 * exponent.exp2()) - 2


def rounded_down(x):
    """The largest magnitude's exponent, and 2."""
    return torch.floor(torch.log2(x.abs().amax(-1).clamp_min(2.0**-120))) - 2


def rounded_over(x):
    """As :func:`rounded_down`, of the next power of two."""
    return torch.ceil(torch.log2(x.abs().amax(-1).clamp_min(2.0**-120))) - 2


#: By the numbers of aiter's enum of them.
ROUNDINGS = (rounded_down, rounded_up, rounded_to_even, rounded_over)


def pack(x, rounding):
    """Bytes ``[.., K / 2]`` and e8m0 ``[.., K / 32]``, both uint8."""
    assert x.shape[-1] % 32 == 0
    groups = x.float().unflatten(-1, (-1, 32))
    exponents = rounding(groups)
    scaled = (groups / exponents.exp2()[..., None]).abs().clamp_max(6.0)
    # Of two that are as near, the one whose last bit is zero: those are at even places.
    distance = (scaled[..., None] - MAGNITUDES).abs()
    nearest = distance.argmin(-1)
    after = (nearest + 1).clamp_max(7)
    tie = distance.gather(-1, nearest[..., None]) == distance.gather(-1, after[..., None])
    codes = torch.where(tie[..., 0] & (nearest % 2 == 1), after, nearest) | (groups < 0).long() << 3
    codes = codes.to(torch.uint8).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def unpack(packed, scales):
    """float32 ``[.., K]``; a scale of 255 is NaN."""
    packed, scales = packed.view(torch.uint8), scales.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    numbers = MAGNITUDES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    powers = torch.where(scales == 255, torch.nan, (scales.float() - 127).exp2())
    return (numbers.unflatten(-1, (-1, 32)) * powers[..., None]).flatten(-2)


def shuffled_scales(scales):
    """``[rows, groups]``, filled up to 256 and 8 with what nobody may read, in the order of matrix cores."""
    rows, groups = scales.shape
    filled = scales.new_full((-(-rows // 256) * 256, -(-groups // 8) * 8), 255)
    filled[:rows, :groups] = scales
    tiles = filled.view(len(filled) // 32, 2, 16, filled.shape[1] // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(filled.shape)


def unshuffled_scales(scales, rows, groups):
    """What :func:`shuffled_scales` was given."""
    scales = scales.view(torch.uint8)
    assert scales.shape == (-(-rows // 256) * 256, -(-groups // 8) * 8)
    assert scales.is_contiguous()
    tiles = scales.view(len(scales) // 32, scales.shape[1] // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(scales.shape)[:rows, :groups]
