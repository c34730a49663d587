"""Checks of a checkpoint's folder, by the code that loads it in a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from atom_plugin.common.load_formats import UNCHECKED_FORMATS
from atom_plugin.doctor.command import Command
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import VLLM, Framework
from atom_plugin.doctor.overrides import check_place, overridden, overrides_of

if TYPE_CHECKING:
    from atom_core.config import ModelConfig


def check_checkpoint(
    folder: Path,
    tensor_parallel_size: int = 1,
    framework: Framework = VLLM,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    expert_parallel: bool = False,
    data_parallel_size: int = 1,
    load_format: str = "auto",
) -> Iterable[Finding]:
    """Errors in `folder`: in its config, as `overrides` change it, or weights whose headers do not fit the model.

    Args:
        folder: the checkpoint.
        tensor_parallel_size, expert_parallel, data_parallel_size: see :class:`atom_plugin.doctor.sharing.Sharing`.
        framework: the server's.
        overrides: of values of ``config.json``.
        load_format: of the server; with one of :data:`UNCHECKED_FORMATS` it reads no weights from the folder.
    """
    # These import torch, which other checks of the doctor do not need.
    from atom_core.checkpoint import config_of, read_config_json
    from atom_core.loading import check_files
    from atom_core.models.read_config import read_model_config
    from atom_core.models.registry import MODELS
    from atom_core.quant import read_quantization

    consequence = framework.refused

    def found(errors: list[str], remedy: str = "Correct the checkpoint") -> list[Finding]:
        remedy = f"{remedy}, or {framework.otherwise} for this model."
        return [Finding(f"{folder}: {error}", consequence, remedy) for error in errors]

    findings = found(said(lambda: read_config_json(folder)) or said(lambda: check_place(framework, overrides, folder)))
    if not findings:
        values = overridden(config_of(folder), overrides, folder, framework)
        if not MODELS.keys() & set(values.get("architectures") or ()):
            consequence = framework.unknown_architecture
        findings = found(said(lambda: read_quantization(values)) + said(lambda: read_model_config(values)))
    if not findings:
        config, quant = read_model_config(values), read_quantization(values)
        read = None if load_format in UNCHECKED_FORMATS else folder
        ranks = tensor_parallel_size, quant, expert_parallel, data_parallel_size if config.has_mixtures else 1
        errors = said(lambda: check_files(config, read, *ranks))
        if errors and not said(lambda: check_files(config, read, 1, quant)):
            findings = found(errors, "Use another number of ranks")
        else:
            findings = found(errors)
    return findings


def said(check: Callable[[], object]) -> list[str]:
    """The error of a check, if there is one."""
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def read_model(folder: Path, command: Command) -> tuple[Mapping[str, Any], ModelConfig] | None:
    """The values of ``config.json``, as ``command`` changes them, and what the core reads of them.

    None: :func:`check_checkpoint` says what is wrong.
    """
    from atom_core.checkpoint import config_of  # imports torch
    from atom_core.models.read_config import read_model_config

    try:
        values = overridden(config_of(folder), overrides_of(command), folder, command.framework or VLLM)
        return values, read_model_config(values)
    except ValueError:
        return None
