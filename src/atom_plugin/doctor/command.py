"""Checks of a server's command line, such as `vllm serve MODEL --model-impl atmo`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atom_plugin.common.support import REFUSED_FLAGS
from atom_plugin.doctor.finding import Finding

MODEL_IMPL = "atom"
VLLM_MODEL_IMPLS = ("auto", "vllm", "transformers", "terratorch")
NATIVE = "vLLM accepts any word there and runs its own model without a word of its own."


@dataclass(frozen=True)
class Command:
    """A vLLM command line, taken apart."""

    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    model: str | None = None


def parse_command(arguments: Sequence[str]) -> Command:
    """Read `[NAME=VALUE ...] vllm serve MODEL --flag value ...`, or the same server started as a module.

    As vLLM does, it takes `--model_impl` for `--model-impl`, and the last of a flag given twice. It knows no flag's
    number of values, so the word behind a flag is its value, and the model is looked for where it must be.

    Raises:
        ValueError: this is not the command line of a vLLM server.
    """
    words = list(arguments)
    environment = {}
    while words and (words[0] == "env" or ("=" in words[0] and not words[0].startswith("-"))):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            environment[name] = value
    model = None
    if "serve" in words[1:2]:
        words = words[2:]
        if words and not words[0].startswith("-"):
            model = words.pop(0)
    elif any(word.startswith("vllm.entrypoints") for word in words):
        words = words[next(index for index, word in enumerate(words) if word.startswith("vllm.entrypoints")) + 1 :]
    else:
        raise ValueError(
            f"{' '.join(arguments)!r} is not the command of a vLLM server; the doctor reads "
            "`vllm serve MODEL ...` and `python -m vllm.entrypoints.openai.api_server --model MODEL ...`"
        )
    flags: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            flags[name.replace("_", "-")] = value if equals else "" if following.startswith("-") else following
    return Command(environment, flags, model or flags.get("--model"))


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


def check_flags(command: Command) -> Iterable[Finding]:
    """Flags for what our models cannot do."""
    refused = f"`--model-impl {MODEL_IMPL}` refuses to start."
    for item in REFUSED_FLAGS:
        value = command.flags.get(item.flag)
        if value is not None and value not in item.allowed:
            given = f"{item.flag} {value}".rstrip()
            allowed = f"; supported: {', '.join(item.allowed)}" if item.allowed else ""
            remedy = f"Leave out {item.flag}, or use --model-impl auto for this model."
            yield Finding(f"{given}: {item.reason}{allowed}.", refused, remedy)


def tensor_parallel_size(command: Command) -> int:
    """How many ranks share each layer."""
    value = command.flags.get("--tensor-parallel-size", command.flags.get("-tp", "1"))
    return int(value) if value.isdecimal() else 1


def local_model(command: Command) -> Path | None:
    """The model's folder, where it is on this machine."""
    folder = Path(command.model) if command.model else None
    return folder if folder is not None and folder.is_dir() else None
