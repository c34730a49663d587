"""MXFP4 experts, as GPT-OSS's checkpoints have them (``quant_method`` "mxfp4"); all else is in the model's dtype.

Activations are not quantised. See :mod:`atom_core.kernels.mxfp4_experts` for the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom_core.quant.errors import unsupported
from atom_core.quant.fp8 import names


@dataclass(frozen=True)
class Mxfp4Config:
    """The experts, and no linear layer."""

    name: str = "mxfp4"

    def linear(self, modules: Sequence[str]) -> None:
        """See :class:`atom_core.quant.QuantConfig`."""

    def below(self, prefix: str) -> Mxfp4Config:
        """See :class:`atom_core.quant.QuantConfig`."""
        return self


def read_mxfp4(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Mxfp4Config:
    """The quantisation of ``config``, of a model of ``hf``.

    Raises:
        ValueError: it is not GPT-OSS's, or leaves experts out.
    """
    kind = hf.get("model_type")
    if kind != "gpt_oss":
        raise unsupported("mxfp4", f"model_type {kind!r} (it is for gpt_oss alone)")
    left_out = [it for it in config.get("modules_to_not_convert") or () if names(it, "model.layers.0.mlp.experts")]
    if left_out:
        raise unsupported("mxfp4", f"modules_to_not_convert {left_out}, which leaves experts out")
    return Mxfp4Config()
