"""Dtypes by the GPU's architecture: FP8 is e4m3fnuz on gfx942, and e4m3fn on gfx950."""

import os

import torch


def __getattr__(name):
    if name == "fp8":
        return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[os.environ["GPU_ARCHS"]]
    raise AttributeError(name)
