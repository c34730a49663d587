"""Quantised checkpoints: from a config's ``quantization_config`` to the scheme of each linear layer.

A scheme is one module here, one entry in :func:`read_quantization`, and one way for a layer to keep its weight
(:mod:`atom_core.layers.linear_methods`). Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from atom_core.quant.errors import unsupported
from atom_core.quant.fp8 import Fp8Config, online_fp8, read_compressed_tensors, read_fp8, read_modelopt
from atom_core.quant.keys import check_keys
from atom_core.quant.mxfp4 import Mxfp4Config, Mxfp4LinearConfig, read_mxfp4
from atom_core.quant.quark import read_quark

__all__ = ["CHECKPOINT_METHODS", "ONLINE_METHODS", "SUPPORTED", "Fp8Config", "Mxfp4Config", "Mxfp4LinearConfig"]
__all__ += ["LinearScheme", "QuantConfig", "Unquantized", "read_quantization", "unsupported"]

#: Schemes that models can run, by the name users know them under; "none" is a checkpoint in its own dtype.
SUPPORTED: tuple[str, ...] = ("none", "fp8", "mxfp4")

#: The scheme of a linear layer.
LinearScheme: TypeAlias = Fp8Config | Mxfp4LinearConfig


class QuantConfig(Protocol):
    """A model's quantisation."""

    @property
    def name(self) -> str:
        """As users know it."""

    def linear(self, modules: Sequence[str]) -> LinearScheme | None:
        """The scheme of a linear layer that is ``modules`` in checkpoints, several where it is merged; None: none.

        Raises:
            ValueError: some of them have it and some have not.
        """

    def experts(self, folder: str, matrices: Sequence[str], count: int) -> LinearScheme | None:
        """The scheme of the ``count`` experts whose ``matrices`` checkpoints have as ``folder.EXPERT.MATRIX``.

        Raises:
            ValueError: some of them have it and some have not.
        """

    def below(self, prefix: str) -> QuantConfig:
        """The same for a model whose modules are named from ``prefix`` on, which checkpoints leave out."""


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


#: Readers of a ``quantization_config``, by its ``quant_method``; the second argument is the whole ``config.json``.
_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], QuantConfig]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "quark": read_quark,
}
CHECKPOINT_METHODS: tuple[str, ...] = tuple(_READERS)
#: What weights of an unquantised checkpoint can be turned into while they are loaded, by the frameworks' flags.
ONLINE_METHODS: tuple[str, ...] = ("fp8", "fp8_per_tensor", "fp8_per_channel")


def read_quantization(hf: Mapping[str, Any], asked: str | None = None) -> QuantConfig:
    """The quantisation of a parsed ``config.json``.

    Args:
        hf: the configuration.
        asked: the quantisation that a flag asks for; of a quantised checkpoint it can only name the checkpoint's own.

    Raises:
        ValueError: a scheme that no model here can run, or a flag and a checkpoint that contradict each other.
    """
    config = hf.get("quantization_config") or hf.get("compression_config")
    if config and not isinstance(config, Mapping):
        raise ValueError(f"The model's config has quantization_config={str(config)[:80]!r}; an object is needed.")
    if not config:
        if asked is None:
            return Unquantized()
        if asked not in ONLINE_METHODS:
            raise unsupported(asked)
        return online_fp8()
    method = str(config.get("quant_method", "unknown"))
    if method not in _READERS:
        raise unsupported(method)
    if asked not in (None, method):
        raise ValueError(
            f"--quantization {asked} contradicts the checkpoint, whose quant_method is {method!r}; leave the flag out."
        )
    from atom_core.quant.schema import check_types  # pydantic, which who only names methods need not wait for

    check_types(method, config)
    quant = _READERS[method](config, hf)
    check_keys(method, config)
    return quant
