"""Parses a server's command line and checks it: the flags of both frameworks, and vLLM's `--model-impl`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType

from atom_plugin.common.flags import Refused
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import SGLANG, VLLM, Framework
from atom_plugin.doctor.sglang import check_asked_for, check_attention_backends, check_cache_order

MODEL_IMPL = "atom"
VLLM_MODEL_IMPLS = ("auto", "vllm", "transformers", "terratorch")
NATIVE = "vLLM accepts any value there and silently runs its own model."
# Servers that are started as `python -m MODULE`, by the prefix of the module's name.
_MODULES = (("vllm.entrypoints", VLLM), ("sglang.launch_server", SGLANG))
_MODEL_FLAGS = ("--model", "--model-path")
_ON, _OFF = ("1", "true"), ("0", "false")
#: vLLM's other names of flags, and the name in its table.
_SHORT = {"--compilation-config": "-cc", "-ac": "--attention-config", "-sc": "--speculative-config"}
_TENSOR_PARALLEL_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
_PIPELINE_PARALLEL_FLAGS = ("--pipeline-parallel-size", "-pp")
_DATA_PARALLEL_FLAGS = ("--data-parallel-size", "-dp")


@dataclass(frozen=True)
class Command:
    """A parsed command line; empty if none was given."""

    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    framework: Framework | None = None


def parse_command(arguments: Sequence[str]) -> Command:
    """Parse `[NAME=VALUE ...] vllm serve MODEL --flag value ...`, the same for SGLang, or the server as a module.

    Like vLLM it accepts `--model_impl` for `--model-impl`, and uses the last value of a repeated flag. It does not know
    how many values a flag has, so it takes the argument after a flag as its value. The model must be the first argument
    or a flag's value.

    Raises:
        ValueError: this is not the command line of a server.
    """
    rest = list(arguments)
    environment = {}
    while rest and (rest[0] == "env" or ("=" in rest[0] and not rest[0].startswith("-"))):
        name, equals, value = rest.pop(0).partition("=")
        if equals:
            environment[name] = value
    server = _server(rest)
    if server is None:
        raise ValueError(
            f"{' '.join(arguments)!r} is not the command of a vLLM or SGLang server; the doctor reads "
            "`vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server --model MODEL ...`, "
            "`sglang serve MODEL ...` and `python -m sglang.launch_server --model-path MODEL ...`"
        )
    framework, rest = server
    flags: dict[str, str] = {}
    for argument, following in zip(rest, [*rest[1:], ""], strict=True):
        if _is_flag(argument):
            name, equals, value = argument.partition("=")
            flags[name.replace("_", "-")] = value if equals else "" if _is_flag(following) else following
    model = rest[0] if rest and not _is_flag(rest[0]) else _first(flags, _MODEL_FLAGS)
    return Command(environment, flags, model, framework)


def _server(arguments: list[str]) -> tuple[Framework, list[str]] | None:
    """The framework whose server `arguments` start, and the arguments after the server's name."""
    if "serve" in arguments[1:2]:
        return SGLANG if PurePath(arguments[0]).name == SGLANG.package else VLLM, arguments[2:]
    for index, argument in enumerate(arguments):
        for module, framework in _MODULES:
            if argument.startswith(module):
                return framework, arguments[index + 1 :]
    return None


def _first(flags: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The value of the first of `names` that is in `flags`."""
    return next((flags[name] for name in names if name in flags), None)


def _is_flag(argument: str) -> bool:
    """Whether `argument` is a flag, and not a negative number."""
    return argument.startswith("-") and not argument[1:].isdecimal()


def check_command(command: Command, environ: Mapping[str, str]) -> Iterable[Finding]:
    """Whether `command`, run in `environ`, asks for our models, and only for what they support."""
    if command.framework is VLLM:
        yield from check_model_impl(command)
    if command.framework is SGLANG:
        yield from check_asked_for(environ)
        yield from check_attention_backends(command.flags)
        yield from check_cache_order(environ)
    yield from check_flags(command, environ)


def check_model_impl(command: Command) -> Iterable[Finding]:
    """`--model-impl` is missing, misspelt, or asks for another implementation."""
    value = command.flags.get("--model-impl")
    remedy = f"Use --model-impl {MODEL_IMPL}."
    if value is None:
        unread = " (a file given with --config is not read here)" if "--config" in command.flags else ""
        nearest = difflib.get_close_matches("--model-impl", command.flags, n=1, cutoff=0.8)
        problem = f"The command has {nearest[0]}" if nearest else "The command has no --model-impl"
        yield Finding(f"{problem}{unread}.", "vLLM runs its own model, as without this package.", remedy)
    elif value in VLLM_MODEL_IMPLS:
        yield Finding(f"--model-impl {value} asks for another implementation.", "vLLM runs its own model.", remedy)
    elif value != MODEL_IMPL:
        yield Finding(f"--model-impl {value!r} is neither {MODEL_IMPL!r} nor one of vLLM's.", NATIVE, remedy)


def check_flags(command: Command, environ: Mapping[str, str] = MappingProxyType({})) -> Iterable[Finding]:
    """Flags and variables that our models refuse, by the same table as routing."""
    framework = command.framework
    if framework is None:
        return
    seen: set[str] = set()
    flags = dict(expanded(command.flags))
    for row in framework.refusals:
        if environ.get(row.unless) in _ON or (row.only_if is not None and not row.only_if(_AsFields(flags))):
            continue
        for name, value in _given(row, flags, environ):
            if name not in seen and row.is_refused_on_the_command_line(name, value):
                seen.add(name)
                given = f"{name} {value}".rstrip() if row.flags else f"{name}={value}"
                remedy = row.instead or f"Leave out {name}, or {framework.otherwise} for this model."
                problem = f"{given}: atom-plugin does not support {row.what}{row.supported()}."
                yield Finding(problem, framework.refused, remedy)


@dataclass(frozen=True)
class _AsFields:
    """Flags as attributes with the names of their fields, None if not given; for :attr:`Refused.only_if`."""

    flags: Mapping[str, str]

    def __getattr__(self, name: str) -> str | None:
        return self.flags.get(f"--{name.replace('_', '-')}")


def _given(row: Refused, flags: Mapping[str, str], environ: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    if not row.flags:
        return ((row.setting, environ[row.setting]),) if row.setting in environ else ()
    # vLLM accepts underscores for dashes in names.
    return tuple((flag, value) for flag in row.flags if (value := flags.get(flag.replace("_", "-"))) is not None)


def is_on(flags: Mapping[str, str], name: str) -> bool:
    """Whether a flag is given, and not with a value that means no."""
    return not is_off(flags.get(name, _OFF[0]))


def is_off(value: str) -> bool:
    """Whether a value means no."""
    return value.lower() in _OFF


def expanded(flags: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Flags, with a JSON object also as one flag for each of its keys: `--kernel-config.moe-backend`."""
    for name, value in flags.items():
        first, dot, rest = name.partition(".")
        yield _SHORT.get(first, first) + dot + rest, value
        try:
            fields = json.loads(value) if value.startswith("{") else {}
        except ValueError:
            continue
        inner = {f"{name}.{key.replace('_', '-')}": _text(it) for key, it in fields.items()}
        yield from expanded(inner)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tensor_parallel_size(command: Command) -> int:
    """The number of tensor-parallel ranks."""
    value = _first(command.flags, _TENSOR_PARALLEL_FLAGS)
    return int(value) if value is not None and value.isdecimal() else 1


def pipeline_parallel_size(command: Command) -> int:
    """The number of pipeline stages in vLLM, 1 at least."""
    return _at_least_one(command, _PIPELINE_PARALLEL_FLAGS)


def data_parallel_size(command: Command) -> int:
    """The number of data-parallel ranks in vLLM, 1 at least."""
    return _at_least_one(command, _DATA_PARALLEL_FLAGS)


def _at_least_one(command: Command, flags: Sequence[str]) -> int:
    value = _first(command.flags, flags)
    return max(1, int(value)) if value is not None and value.isdecimal() else 1


def local_model(command: Command) -> Path | None:
    """The model's folder on this machine: as given, or in Hugging Face's cache; None if it is not here."""
    if not command.model:
        return None
    if Path(command.model).is_dir():
        return Path(command.model)
    try:
        from atom_plugin.common.hub import whole_folder  # imports torch
    except ModuleNotFoundError:  # huggingface_hub comes with the frameworks
        return None
    revision, cache = command.flags.get("--revision"), command.flags.get("--download-dir")
    return whole_folder(command.model, revision, cache)
