"""Enums that functions take, with the numbers that aiter's have."""

from enum import Enum

_QUANTIZED = "No per_Tensor per_Token per_1x32 per_1x128 per_128x128 per_256x128 per_1024x128"
QuantType = Enum("QuantType", _QUANTIZED.split(), start=0)


class ActivationType(Enum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class GateMode(str, Enum):
    SEPARATED = "separated"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"
    INTERLEAVE = "interleave"


class MlaVersion(Enum):
    V32 = 0
    V40 = 1
