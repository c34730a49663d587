"""Real signatures, held against every call: names, what is required, kinds of arguments, dtypes that are stated.

A call is kept with where it was made, so that a test can say which of our calls it saw.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from aiter.ops.enum import ActivationType, GateMode, MlaVersion, QuantType

_FILE = json.loads((Path(__file__).parents[1] / "aiter_signatures.json").read_text())
RECORD = _FILE["functions"]
#: Methods of classes, which frameworks hold objects of.
METHODS = _FILE["methods"]


class Call(NamedTuple):
    """One call of a function of aiter's."""

    path: str
    file: str
    line: int
    arguments: dict[str, Any]
    """As it was made: tensors are the caller's own."""


#: All calls since this was imported.
CALLS: list[Call] = []


def real_signature(path: str) -> inspect.Signature:
    """The signature of a function as aiter has it; defaults are what their text says, annotations text."""
    return _parsed(RECORD[path]["signature"])


def _parsed(signature: str) -> inspect.Signature:
    source = f"from __future__ import annotations\ndef f{signature}: ..."
    names: dict[str, Any] = {
        "torch": torch,
        "dtypes": _Dtypes(),
        "MX_DEFAULT_ROUND_MODE": 1,  # up
        "PAD_SLOT_ID": -1,
        **{it.__name__: it for it in (ActivationType, GateMode, MlaVersion, QuantType)},
    }
    exec(source, names)
    return inspect.signature(names["f"])


class _Dtypes:
    """What defaults of signatures name."""

    bf16, fp16, fp32, i8 = torch.bfloat16, torch.float16, torch.float32, torch.int8


#: What an argument is by its annotation. A bool is an int to C++, and an int a float.
KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "torch.Tensor": (torch.Tensor,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "torch.dtype": (torch.dtype,),
}


def check_arguments(path: str, arguments: dict[str, Any]) -> None:
    """Arguments are of the kinds that the signature says, tensors of the dtypes that are recorded beside it.

    Raises:
        TypeError: one is not.
    """
    dtypes = RECORD[path].get("dtypes", {})
    for name, parameter in real_signature(path).parameters.items():
        value = arguments.get(name, parameter.default)
        text = "" if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        kinds = [kind for part in text.split("|") for kind in KINDS.get(part.strip(), ())]
        if value is None or value is parameter.default:
            if value is None and name in arguments and text and "None" not in text and parameter.default is not None:
                raise TypeError(f"{path} takes no None for {name}: {text}")
            continue
        if kinds and not isinstance(value, tuple(kinds)):
            raise TypeError(f"{path} takes {text} for {name}, not {value!r}")
        allowed = dtypes.get(name)
        if allowed and str(value.dtype).removeprefix("torch.") not in allowed:
            raise TypeError(f"{path} takes {name} in {' or '.join(allowed)}, not {value.dtype}")


def real(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what stands in for the function ``path``."""

    def decorate(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        signature = real_signature(path)

        @functools.wraps(stand_in)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            frame = sys._getframe(1)
            CALLS.append(Call(path, frame.f_code.co_filename, frame.f_lineno, dict(arguments)))
            check_arguments(path, arguments)
            return stand_in(**arguments)

        return call

    return decorate


def real_method(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what stands in for the method ``path``, "Class.method", whose parameters must be the real one's."""
    real_parameters = _parsed(METHODS[path]["signature"]).parameters.values()

    def decorate(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        found = inspect.signature(stand_in).parameters.values()
        assert [(it.name, it.kind, it.default) for it in found] == [
            (it.name, it.kind, it.default) for it in real_parameters
        ], f"{path} is {METHODS[path]['signature']}"
        return stand_in

    return decorate
