"""A server's command line, taken apart, and its checks: the flags of both frameworks, and vLLM's `--model-impl`."""

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
NATIVE = "vLLM accepts any word there and runs its own model without a word of its own."
# Servers that are started as `python -m MODULE`, by how the module's name begins.
_MODULES = (("vllm.entrypoints", VLLM), ("sglang.launch_server", SGLANG))
_MODEL_FLAGS = ("--model", "--model-path")
_ON = ("1", "true")
#: Names of vLLM's for one flag, as its rows have it.
_SHORT = {"--compilation-config": "-cc", "-ac": "--attention-config", "-sc": "--speculative-config"}
_TENSOR_PARALLEL_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")


@dataclass(frozen=True)
class Command:
    """A command line, taken apart; nothing in it where none was given."""

    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    framework: Framework | None = None


def parse_command(arguments: Sequence[str]) -> Command:
    """Read `[NAME=VALUE ...] vllm serve MODEL --flag value ...`, SGLang's likewise, or the same server as a module.

    As vLLM does, it takes `--model_impl` for `--model-impl`, and the last of a flag given twice. It knows no flag's
    number of values, so the word behind a flag is its value, and the model is looked for where it must be.

    Raises:
        ValueError: this is not the command line of a server.
    """
    words = list(arguments)
    environment = {}
    while words and (words[0] == "env" or ("=" in words[0] and not words[0].startswith("-"))):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            environment[name] = value
    server = _server(words)
    if server is None:
        raise ValueError(
            f"{' '.join(arguments)!r} is not the command of a vLLM server, nor of an SGLang server; the doctor reads "
            "`vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server --model MODEL ...`, "
            "`sglang serve MODEL ...` and `python -m sglang.launch_server --model-path MODEL ...`"
        )
    framework, words = server
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if _is_flag(word):
            name, equals, value = word.partition("=")
            flags[name.replace("_", "-")] = value if equals else "" if _is_flag(following) else following
    model = words[0] if words and not _is_flag(words[0]) else _first(flags, _MODEL_FLAGS)
    return Command(environment, flags, model, framework)


def _server(words: list[str]) -> tuple[Framework, list[str]] | None:
    """Whose server `words` would start, and what is behind its name."""
    if "serve" in words[1:2]:
        return SGLANG if PurePath(words[0]).name == SGLANG.package else VLLM, words[2:]
    for index, word in enumerate(words):
        for module, framework in _MODULES:
            if word.startswith(module):
                return framework, words[index + 1 :]
    return None


def _first(flags: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The value of the first of `names` that is given."""
    return next((flags[name] for name in names if name in flags), None)


def _is_flag(word: str) -> bool:
    """Whether `word` is a flag, and not the value -1 of one."""
    return word.startswith("-") and not word[1:].isdecimal()


def check_command(command: Command, environ: Mapping[str, str]) -> Iterable[Finding]:
    """Whether `command`, run in `environ`, asks for our models, and for nothing that they cannot do."""
    if command.framework is VLLM:
        yield from check_model_impl(command)
    if command.framework is SGLANG:
        yield from check_asked_for(environ)
        yield from check_attention_backends(command.flags)
        yield from check_cache_order(environ)
    yield from check_flags(command, environ)


def check_model_impl(command: Command) -> Iterable[Finding]:
    """`--model-impl` missing, misspelt, or asking for another implementation."""
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
    """Flags and variables that ask for what our models cannot do, by the rows that routing refuses by."""
    framework = command.framework
    if framework is None:
        return
    seen: set[str] = set()
    flags = dict(_expanded(command.flags))
    for row in framework.refusals:
        if environ.get(row.unless) in _ON or (row.beside is not None and not row.beside(_AsFields(flags))):
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
    """Flags as the fields that they set, None where they are not there: what a row asks of other settings."""

    flags: Mapping[str, str]

    def __getattr__(self, name: str) -> str | None:
        return self.flags.get(f"--{name.replace('_', '-')}")


def _given(row: Refused, flags: Mapping[str, str], environ: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    if not row.flags:
        return ((row.setting, environ[row.setting]),) if row.setting in environ else ()
    # vLLM takes underscores for dashes in names.
    return tuple((flag, value) for flag in row.flags if (value := flags.get(flag.replace("_", "-"))) is not None)


def _expanded(flags: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Flags, and for one with a JSON object the flags that give its parts: `--kernel-config.moe-backend`."""
    for name, value in flags.items():
        first, dot, rest = name.partition(".")
        yield _SHORT.get(first, first) + dot + rest, value
        try:
            parts = json.loads(value) if value.startswith("{") else {}
        except ValueError:
            continue
        inner = {f"{name}.{key.replace('_', '-')}": _text(part) for key, part in parts.items()}
        yield from _expanded(inner)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tensor_parallel_size(command: Command) -> int:
    """How many ranks share each layer."""
    value = _first(command.flags, _TENSOR_PARALLEL_FLAGS)
    return int(value) if value is not None and value.isdecimal() else 1


def local_model(command: Command) -> Path | None:
    """The model's folder, where it is on this machine: as it was given, or what Hugging Face's cache has of a name."""
    if not command.model:
        return None
    if Path(command.model).is_dir():
        return Path(command.model)
    try:
        from atom_plugin.common.hub import whole_folder  # brings torch
    except ModuleNotFoundError:  # huggingface_hub comes with the frameworks
        return None
    revision, cache = command.flags.get("--revision"), command.flags.get("--download-dir")
    return whole_folder(command.model, revision, cache)
