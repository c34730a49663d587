"""Dtypes by the GPU's architecture: FP8 is e4m3fnuz on gfx942, and e4m3fn on gfx950; those of MXFP4."""

import os

import torch


def __getattr__(name):
    if name == "fp8":
        return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[os.environ["GPU_ARCHS"]]
    if name in ("fp4x2", "fp8_e8m0"):
        return torch.float4_e2m1fn_x2 if name == "fp4x2" else torch.float8_e8m0fnu
    raise AttributeError(name)
