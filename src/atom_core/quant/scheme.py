"""The base of linear layers' schemes: which modules of a checkpoint are quantised."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from atom_core.language_model import spellings
from atom_core.quant.errors import unsupported

_HEAD = "lm_head"

SchemeT = TypeVar("SchemeT", bound="LayerScheme")


@dataclass(frozen=True, kw_only=True)
class LayerScheme:
    """One scheme for a model's linear layers, with exceptions; the embedding and the head are not quantised."""

    ignored: tuple[str, ...] = ()
    """Patterns of unquantised modules; see :func:`matches_name`."""
    targets: tuple[str, ...] = ()
    """compressed-tensors' patterns of quantised modules; they and :attr:`ignored` then match as :func:`is_target` does.
    Empty: all linear layers."""
    prefix: str = ""
    """The start of the model's module names that checkpoint names lack."""

    def linear(self: SchemeT, modules: Sequence[str]) -> SchemeT | None:
        """See :class:`atom_core.quant.QuantConfig`."""
        ignored = {module: self.ignores(module.removeprefix(self.prefix)) for module in modules}
        if all(ignored.values()) and ignored:
            return None
        if any(ignored.values()):
            left_out = ", ".join(module for module, is_ignored in ignored.items() if is_ignored)
            raise ValueError(
                f"The checkpoint quantises only some of {', '.join(modules)}, which are one weight here: its config "
                f"leaves out {left_out}. Supported: all of them quantised, or none."
            )
        return self

    def experts(self: SchemeT, folder: str, matrices: Sequence[str], count: int) -> SchemeT | None:
        """See :class:`atom_core.quant.QuantConfig`."""
        scheme = self.linear([f"{folder}.0.{matrix}" for matrix in matrices])
        # A configuration may list hundreds of modules: for each expert only the patterns that may name one are tried.
        common = replace(self, ignored=tuple(it for it in self.ignored if not _may_name_one_expert(it)))
        if scheme is None and common.linear([f"{folder}.0.{matrix}" for matrix in matrices]) is None:
            return None
        folders = spellings(folder.removeprefix(self.prefix))
        single = replace(
            self,
            ignored=tuple(it for it in self.ignored if _may_name_one_expert(it) and _may_match_under(it, folders)),
        )
        differs = single.ignored or any(map(_may_name_one_expert, self.targets))
        for expert in range(1, count if differs else 1):
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
        names = spellings(module)
        if self.targets:
            targeted = any(is_target(pattern, name) for pattern in self.targets for name in names)
            return not targeted or any(is_target(pattern, name) for pattern in self.ignored for name in names)
        return any(matches_name(pattern, name) for pattern in self.ignored for name in names)


def _may_name_one_expert(pattern: str) -> bool:
    """Whether a pattern can match one expert of a layer and not another."""
    components = pattern.split(".")
    return pattern.startswith("re:") or "*" in pattern or "experts" in components or components[0].isdigit()


def _may_match_under(pattern: str, folders: Collection[str]) -> bool:
    """Whether a pattern may match a module below one of ``folders``, which end in "experts"; often it names others."""
    if pattern.startswith("re:") or not all(it.endswith("experts") for it in folders):
        return True
    fixed, *wild = re.split(r"[*?[]", pattern, maxsplit=1)
    if wild:
        return any(fixed.startswith(f"{it}.") or it.startswith(fixed) for it in folders)
    components = pattern.split(".")
    if "experts" not in components:
        return True
    stem = ".".join(components[: components.index("experts") + 1])
    return any(f".{it}".endswith(f".{stem}") for it in folders)


def matches_name(pattern: str, module: str) -> bool:
    """Whether a config's ``pattern`` matches ``module``.

    "re:" begins a regular expression that matches from the start of the name; "*" is a wildcard; any other pattern is
    one or more consecutive components of the name ("mlp.down_proj", "model.layers.0").
    """
    if pattern.startswith("re:"):
        return _matches(pattern, module)
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def is_target(pattern: str, module: str) -> bool:
    """Whether a compressed-tensors pattern matches a linear layer ``module``, as in that library.

    "re:" begins a regular expression that matches from the start of the name; any other pattern is the full name or the
    class, "Linear". A parent's name does not match its children.
    """
    if pattern.startswith("re:"):
        return _matches(pattern, module)
    return pattern in (module, "Linear")


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ValueError(
            f"The model's config has quantization_config with {pattern!r}, which is not a regular expression: {error}."
        ) from error


def with_plain_head(scheme: SchemeT, method: str, hf: Mapping[str, Any]) -> SchemeT:
    """``scheme``; a ValueError if it quantises the head."""
    if not scheme.ignores(_HEAD) and not hf.get("tie_word_embeddings", False):
        raise unsupported(method, f"a quantised {_HEAD} (no list of modules left out has it)")
    return scheme
