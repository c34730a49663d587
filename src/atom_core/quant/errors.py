"""The error for an unsupported quantisation."""

from __future__ import annotations


def unsupported(method: str, detail: str = "") -> ValueError:
    """The error for a checkpoint's or flag's quantisation ``method``, or for an unsupported ``detail`` of it."""
    return ValueError(
        f"Quantisation {method!r}{f' with {detail}' if detail else ''} is not supported; supported: unquantised "
        "checkpoints (bfloat16, float16, float32), unchanged or quantised while loading (--quantization fp8), "
        "FP8 checkpoints with one scale per weight, per row or per block of 128 by 128 "
        "(quant_method fp8, compressed-tensors, modelopt, quark), MXFP4 checkpoints of AMD Quark (quant_method quark), "
        "and GPT-OSS with experts in MXFP4 (quant_method mxfp4)."
    )
