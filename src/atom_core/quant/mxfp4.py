"""MXFP4 for experts only, as in GPT-OSS's checkpoints (``quant_method`` "mxfp4"), or for all linear layers.

See :mod:`atom_core.kernels.mxfp4_linear` for the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom_core.quant.errors import unsupported
from atom_core.quant.scheme import LayerScheme, matches_name

#: Elements of a row that share a scale.
GROUP = 32


@dataclass(frozen=True)
class Mxfp4Config:
    """GPT-OSS's: only the experts' weights are quantised."""

    name: str = "mxfp4"
    ignored: tuple[str, ...] = ()
    """Unquantised modules; they may not include experts."""

    def linear(self, modules: Sequence[str]) -> None:
        """See :class:`atom_core.quant.QuantConfig`."""

    def experts(self, folder: str, matrices: Sequence[str], count: int) -> None:
        """None: GPT-OSS's experts are no linear layers. A ValueError if some experts are unquantised."""
        left_out = [it for it in self.ignored if any(matches_name(it, f"{folder}.{matrix}") for matrix in matrices)]
        if left_out:
            raise unsupported("mxfp4", f"modules_to_not_convert {left_out}, which leaves experts out ({folder})")

    def below(self, prefix: str) -> Mxfp4Config:
        """See :class:`atom_core.quant.QuantConfig`."""
        return self


@dataclass(frozen=True, kw_only=True)
class Mxfp4LinearConfig(LayerScheme):
    """Linear layers and experts in MXFP4."""

    rounded_inputs: bool
    """Whether activations are MXFP4 too, with a scale for each group of a token's elements."""
    name: str = "mxfp4"


def read_mxfp4(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Mxfp4Config:
    """A checkpoint of ``quant_method`` "mxfp4"; a ValueError if it is not GPT-OSS's."""
    kind = hf.get("model_type")
    if kind != "gpt_oss":
        raise unsupported("mxfp4", f"model_type {kind!r} (only gpt_oss)")
    return Mxfp4Config(ignored=tuple(config.get("modules_to_not_convert") or ()))
