"""Scales of MXFP4 in the order in which matrix cores read them."""

import torch
from aiter._mxfp4 import shuffled_scales
from aiter._recorded import real


@real("aiter.utility.fp4_utils.e8m0_shuffle")
def e8m0_shuffle(scale):
    assert scale.dtype == torch.uint8
    assert scale.dim() == 2
    return shuffled_scales(scale)
