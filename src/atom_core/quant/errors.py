"""What to tell a user whose quantisation no model here can run."""

from __future__ import annotations


def unsupported(method: str, detail: str = "") -> ValueError:
    """The error for a quantisation ``method`` that a checkpoint has or a flag asks for.

    Args:
        method: as the checkpoint or the flag calls it.
        detail: what about it cannot be run, where the method as such can.
    """
    return ValueError(
        f"Quantisation {method!r}{f' with {detail}' if detail else ''} is not supported; supported: unquantised "
        "checkpoints (bfloat16, float16, float32), as they are or quantised while they are loaded (--quantization "
        "fp8), FP8 checkpoints with one scale for a weight, for each of its rows or for each block of 128 by 128 "
        "(quant_method fp8, compressed-tensors, modelopt, quark), MXFP4 checkpoints of AMD Quark (quant_method quark), "
        "and GPT-OSS with experts in MXFP4 (quant_method mxfp4)."
    )
