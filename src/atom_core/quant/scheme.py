"""What the schemes of linear layers share: which modules of a checkpoint they are for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from atom_core.quant.errors import unsupported

_HEAD = "lm_head"

SchemeT = TypeVar("SchemeT", bound="LayerScheme")


@dataclass(frozen=True, kw_only=True)
class LayerScheme:
    """How all linear layers of a model are quantised but for some; the embedding and the head are not."""

    ignored: tuple[str, ...] = ()
    """Modules that stay as they are: see :func:`names`."""
    targets: tuple[str, ...] = ()
    """Of compressed-tensors, whose patterns name whole modules or classes: those that are quantised; see
    :func:`is_target`. Empty: all linear layers, and :attr:`ignored` by parts of names."""
    prefix: str = ""
    """What the model's module names start with, before those of checkpoints."""

    def linear(self: SchemeT, modules: Sequence[str]) -> SchemeT | None:
        """See :class:`atom_core.quant.QuantConfig`."""
        ignored = {module: self.ignores(module.removeprefix(self.prefix)) for module in modules}
        if all(ignored.values()) and ignored:
            return None
        if any(ignored.values()):
            kept = ", ".join(module for module, is_ignored in ignored.items() if is_ignored)
            raise ValueError(
                f"The checkpoint quantises only some of {', '.join(modules)}, which are one weight here: its config "
                f"leaves out {kept}. Supported: all of them quantised, or none."
            )
        return self

    def experts(self: SchemeT, folder: str, matrices: Sequence[str], count: int) -> SchemeT | None:
        """See :class:`atom_core.quant.QuantConfig`."""
        scheme = self.linear([f"{folder}.0.{matrix}" for matrix in matrices])
        # What names no single expert says the same of all of them, and configurations list hundreds of such modules.
        common = replace(self, ignored=tuple(it for it in self.ignored if not _may_name_one_expert(it)))
        if scheme is None and common.linear([f"{folder}.0.{matrix}" for matrix in matrices]) is None:
            return None
        single = replace(self, ignored=tuple(it for it in self.ignored if _may_name_one_expert(it)))
        tells = single.ignored or any(map(_may_name_one_expert, self.targets))
        for expert in range(1, count if tells else 1):
            if (single.linear([f"{folder}.{expert}.{it}" for it in matrices]) is None) != (scheme is None):
                left_out = 0 if scheme is None else expert
                raise ValueError(
                    f"The checkpoint quantises only some experts of {folder}, which are one weight here: its config "
                    f"leaves out {folder}.{left_out}, and not all of them. Supported: all of them quantised, or none."
                )
        return scheme

    def below(self: SchemeT, prefix: str) -> SchemeT:
        """See :class:`atom_core.quant.QuantConfig`."""
        return replace(self, prefix=f"{prefix}." if prefix else "")

    def ignores(self, module: str) -> bool:
        """Whether the checkpoint's ``module`` is not quantised."""
        if self.targets:
            targeted = any(is_target(pattern, module) for pattern in self.targets)
            return not targeted or any(is_target(pattern, module) for pattern in self.ignored)
        return any(names(pattern, module) for pattern in self.ignored)


def _may_name_one_expert(pattern: str) -> bool:
    """Whether a pattern can name one expert of a mixture and not another."""
    return pattern.startswith("re:") or "*" in pattern or "expert" in pattern or pattern.partition(".")[0].isdigit()


def names(pattern: str, module: str) -> bool:
    """Whether a config's ``pattern`` names ``module``.

    "re:" begins a regular expression, which matches from the name's start on; "*" stands for anything; else the pattern
    is some whole parts of the name in a row ("mlp.down_proj", "model.layers.0").
    """
    if pattern.startswith("re:"):
        return _matches(pattern, module)
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def is_target(pattern: str, module: str) -> bool:
    """Whether a pattern of compressed-tensors names a linear layer ``module``, as that library has it.

    "re:" begins a regular expression, which matches from the name's start on; else the pattern is the whole name, or
    the class, "Linear". The name of a parent names none of the modules in it.
    """
    if pattern.startswith("re:"):
        return _matches(pattern, module)
    return pattern in (module, "Linear")


def _matches(pattern: str, module: str) -> bool:
    """Whether the expression behind "re:" matches from the name's start on."""
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ValueError(
            f"The model's config has quantization_config with {pattern!r}, which is no regular expression: {error}."
        ) from error


def with_plain_head(scheme: SchemeT, method: str, hf: Mapping[str, Any]) -> SchemeT:
    """``scheme`` itself, of checkpoints whose head is not quantised.

    Raises:
        ValueError: it is.
    """
    if not scheme.ignores(_HEAD) and not hf.get("tie_word_embeddings", False):
        raise unsupported(method, f"a quantised {_HEAD} (no list of modules left out has it)")
    return scheme
