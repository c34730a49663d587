"""Quantised checkpoints: from a config's ``quantization_config`` to how a linear layer keeps and uses its weights.

A scheme is one module here and one entry in :func:`read_quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

#: Schemes that models can run, by the name users know them under; "none" is a checkpoint in its own dtype.
SUPPORTED: tuple[str, ...] = ("none",)


class QuantConfig(Protocol):
    """A checkpoint's quantisation."""

    @property
    def name(self) -> str:
        """As users know it."""


@dataclass(frozen=True)
class Unquantized:
    """Weights in the model's dtype."""

    name: str = "none"


def read_quantization(hf: Mapping[str, Any]) -> QuantConfig:
    """The scheme of a parsed ``config.json``.

    Raises:
        ValueError: a scheme that no model here can run.
    """
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config:
        return Unquantized()
    raise unsupported(str(config.get("quant_method", "unknown")))


def unsupported(method: str) -> ValueError:
    """The error for a quantisation ``method`` that is asked for, by a checkpoint or by a flag."""
    return ValueError(
        f"Quantisation {method!r} is not supported; supported: unquantised checkpoints (bfloat16, float16, float32)."
    )
