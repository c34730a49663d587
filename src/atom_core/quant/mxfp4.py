"""MXFP4: of experts alone, as GPT-OSS's checkpoints have them (``quant_method`` "mxfp4"), or of all linear layers.

See :mod:`atom_core.kernels.mxfp4_linear` for the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom_core.quant.errors import unsupported
from atom_core.quant.scheme import LayerScheme, names

#: Numbers of a row that share a scale.
GROUP = 32


@dataclass(frozen=True)
class Mxfp4Config:
    """GPT-OSS's: the experts and no linear layer; activations are not quantised."""

    name: str = "mxfp4"
    ignored: tuple[str, ...] = ()
    """Modules that stay as they are; no experts may be among them."""

    def linear(self, modules: Sequence[str]) -> None:
        """See :class:`atom_core.quant.QuantConfig`."""

    def experts(self, folder: str, matrices: Sequence[str], count: int) -> None:
        """See :class:`atom_core.quant.QuantConfig`: all experts in ``folder`` are MXFP4, which is no linear layer's.

        Raises:
            ValueError: some are left out.
        """
        left_out = [it for it in self.ignored if any(names(it, f"{folder}.{matrix}") for matrix in matrices)]
        if left_out:
            raise unsupported("mxfp4", f"modules_to_not_convert {left_out}, which leaves experts out ({folder})")

    def below(self, prefix: str) -> Mxfp4Config:
        """See :class:`atom_core.quant.QuantConfig`."""
        return self


@dataclass(frozen=True, kw_only=True)
class Mxfp4LinearConfig(LayerScheme):
    """Linear layers, and experts matrix by matrix."""

    rounded_inputs: bool
    """Activations are MXFP4 too, each group of a token's numbers with a scale of its own."""
    name: str = "mxfp4"


def read_mxfp4(config: Mapping[str, Any], hf: Mapping[str, Any]) -> Mxfp4Config:
    """The quantisation of ``config``, of a model of ``hf``.

    Raises:
        ValueError: it is not GPT-OSS's.
    """
    kind = hf.get("model_type")
    if kind != "gpt_oss":
        raise unsupported("mxfp4", f"model_type {kind!r} (it is for gpt_oss alone)")
    return Mxfp4Config(ignored=tuple(config.get("modules_to_not_convert") or ()))
