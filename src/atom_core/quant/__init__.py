"""Quantised checkpoints: from ``quantization_config`` to the scheme of each linear layer.

A scheme is a module here, an entry in ``_READERS``, and a linear method (:mod:`atom_core.layers.linear_methods`). This
package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from atom_core.language_model import of_text
from atom_core.quant.errors import unsupported
from atom_core.quant.fp8 import Fp8Config, online_fp8, read_compressed_tensors, read_fp8, read_modelopt
from atom_core.quant.keys import check_keys
from atom_core.quant.mxfp4 import Mxfp4Config, Mxfp4LinearConfig, read_mxfp4
from atom_core.quant.quark import read_quark

__all__ = ["CHECKPOINT_METHODS", "ONLINE_METHODS", "SUPPORTED", "Fp8Config", "Mxfp4Config", "Mxfp4LinearConfig"]
__all__ += ["LinearScheme", "QuantConfig", "Unquantized", "read_quantization", "unsupported"]

#: User-facing names of the supported schemes; "none" is an unquantised checkpoint.
SUPPORTED: tuple[str, ...] = ("none", "fp8", "mxfp4")

#: The scheme of a linear layer.
LinearScheme: TypeAlias = Fp8Config | Mxfp4LinearConfig


class QuantConfig(Protocol):
    """A model's quantisation."""

    @property
    def name(self) -> str:
        """The user-facing name."""

    def linear(self, modules: Sequence[str]) -> LinearScheme | None:
        """The scheme of a linear layer that merges the checkpoint's ``modules``; None: unquantised.

        Raises:
            ValueError: only some of them are quantised.
        """

    def experts(self, folder: str, matrices: Sequence[str], count: int) -> LinearScheme | None:
        """The scheme of ``count`` experts, whose checkpoint names are ``folder.EXPERT.MATRIX`` with ``matrices``.

        Raises:
            ValueError: only some of them are quantised.
        """

    def below(self, prefix: str) -> QuantConfig:
        """This quantisation for module names that start with ``prefix``, which checkpoint names lack."""


@dataclass(frozen=True)
class Unquantized:
    """Weights in the model's dtype."""

    name: str = "none"

    def linear(self, modules: Sequence[str]) -> None:
        """See :class:`QuantConfig`."""

    def experts(self, folder: str, matrices: Sequence[str], count: int) -> None:
        """See :class:`QuantConfig`."""

    def below(self, prefix: str) -> Unquantized:
        """See :class:`QuantConfig`."""
        return self


#: Readers by ``quant_method``, of (``quantization_config``, the whole ``config.json``).
_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], QuantConfig]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "quark": read_quark,
}
CHECKPOINT_METHODS: tuple[str, ...] = tuple(_READERS)
#: Values of the frameworks' flag that quantise an unquantised checkpoint while loading.
ONLINE_METHODS: tuple[str, ...] = ("fp8", "fp8_per_tensor", "fp8_per_channel")


def read_quantization(hf: Mapping[str, Any], requested: str | None = None) -> QuantConfig:
    """The quantisation of a parsed ``config.json`` and of a flag's value, ``requested``.

    Raises:
        ValueError: an unsupported scheme, or a flag that contradicts the checkpoint's own quantisation.
    """
    hf = of_text(hf)
    config = hf.get("quantization_config") or hf.get("compression_config")
    if config and not isinstance(config, Mapping):
        raise ValueError(f"The model's config has quantization_config={str(config)[:80]!r}; an object is needed.")
    if not config:
        if requested is None:
            return Unquantized()
        if requested not in ONLINE_METHODS:
            raise unsupported(requested)
        return online_fp8()
    method = str(config.get("quant_method", "unknown"))
    if method not in _READERS:
        raise unsupported(method)
    if requested not in (None, method):
        raise ValueError(
            f"--quantization {requested} contradicts the checkpoint's quant_method {method!r}; leave the flag out."
        )
    from atom_core.quant.schema import check_types  # imports pydantic, which callers that only list methods skip

    check_types(method, config)
    quant = _READERS[method](config, hf)
    check_keys(method, config)
    return quant
