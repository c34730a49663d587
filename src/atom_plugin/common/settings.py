"""All ATOM_* environment variables, with their types and descriptions.

`load_settings` reads them. Other code gets the frozen result, so nothing else reads the environment. A value that does
not parse and an unknown ATOM_* variable are errors. This module imports only the standard library, because vLLM's
platform detection imports it for every user.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

PREFIX = "ATOM_"
_BOOLEANS = MappingProxyType({"0": False, "1": True, "false": False, "true": True})


def _parse_bool(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"it takes one of {', '.join(_BOOLEANS)}") from None


def _parse_kernels(text: str) -> Mapping[str, str]:
    form = 'it takes the form "op=implementation,op=implementation", e.g. "attention=triton,rms_norm=reference"'
    kernels: dict[str, str] = {}
    for item in text.split(","):
        op, equals, implementation = (part.strip() for part in item.partition("="))
        if not (op and equals and implementation) or "=" in implementation:
            raise ValueError(f"{form}; {item.strip()!r} does not")
        if op in kernels:
            raise ValueError(f"{form}, each op once; {op!r} is given twice")
        kernels[op] = implementation
    return MappingProxyType(kernels)


def _variable(default: Callable[[], Any], parse: Callable[[str], Any], form: str, description: str) -> Any:
    return field(default_factory=default, metadata={"parse": parse, "form": form, "description": description})


@dataclass(frozen=True)
class Settings:
    """The settings of one process; each field is the variable ATOM_<FIELD>."""

    disable_vllm_plugin: bool = _variable(
        bool,
        _parse_bool,
        "0, 1, true or false",
        "Behave in vLLM as if this package were not installed. vLLM then ignores `--model-impl atom` and runs its own "
        "model; one warning says so.",
    )
    disable_vllm_attention: bool = _variable(
        bool,
        _parse_bool,
        "0, 1, true or false",
        "Run our models on vLLM's own attention layer and the platform's attention backend.",
    )
    aiter: bool = _variable(
        lambda: True,
        _parse_bool,
        "0, 1, true or false",
        "On AMD's gfx942 and gfx950: prefer the kernels of AMD's library aiter. With 0 our models run on Triton "
        "kernels, and ATOM_KERNELS may name aiter for single ops. The default is 1; then a missing aiter is an error.",
    )
    shuffled_cache: bool = _variable(
        bool,
        _parse_bool,
        "0, 1, true or false",
        "On AMD: store keys and values in the layout of aiter's fastest decode kernels, for models without MLA.",
    )
    aiter_qk_norm_rope_cache: bool = _variable(
        bool,
        _parse_bool,
        "0, 1, true or false",
        "On AMD: use aiter's kernel instead of Triton's for norm and rope of q and k and the cache write; it rounds "
        "cosines and sines to the model's dtype.",
    )
    allow_untested_framework: bool = _variable(
        bool,
        _parse_bool,
        "0, 1, true or false",
        "Also serve our models with a version of vLLM or SGLang outside the supported range, with a warning.",
    )
    kernels: Mapping[str, str] = _variable(
        lambda: MappingProxyType({}),
        _parse_kernels,
        "op=implementation,...",
        "Force the implementation of single ops. An implementation that cannot run the model is an error; the "
        "table in the log names an op that no layer uses.",
    )


@dataclass(frozen=True)
class Variable:
    """The name and description of an environment variable."""

    name: str
    form: str
    description: str


def variables() -> tuple[Variable, ...]:
    """All variables that exist."""
    return tuple(
        Variable(PREFIX + item.name.upper(), item.metadata["form"], item.metadata["description"])
        for item in dataclasses.fields(Settings)
    )


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The unknown ATOM_* variables of `environ`, each with its error message."""
    known = [variable.name for variable in variables()]
    messages = {}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known variables: {', '.join(known)}."
            messages[name] = f"unknown environment variable {name} (value {environ[name]!r}): {hint}"
    return messages


def readable_settings(environ: Mapping[str, str]) -> Settings:
    """The settings that can be read; all others have their defaults."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Settings):
        try:
            values[item.name] = item.metadata["parse"](environ[PREFIX + item.name.upper()])
        except (KeyError, ValueError):
            continue
    return Settings(**values)


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read all settings from `environ`, by default the environment of the process.

    Raises:
        ValueError: a variable is unknown, or its value does not parse.
    """
    environ = os.environ if environ is None else environ
    for message in unknown_variables(environ).values():
        raise ValueError(message)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Settings):
        name = PREFIX + item.name.upper()
        if name in environ:
            try:
                values[item.name] = item.metadata["parse"](environ[name])
            except ValueError as error:
                raise ValueError(f"{name}={environ[name]!r}: {error}.") from None
    return Settings(**values)
