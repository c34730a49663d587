"""What vLLM's command says of speculative decoding, and checks of drafts by a checkpoint's own layers there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom_core.language_model import of_text
from atom_core.models.registry import DRAFTS, MODELS
from atom_plugin.common.load_formats import UNCHECKED_FORMATS
from atom_plugin.doctor.checkpoint import read_model, said
from atom_plugin.doctor.command import Command, expanded, pipeline_parallel_size, tensor_parallel_size
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import VLLM
from atom_plugin.vllm import own_layers

if TYPE_CHECKING:
    from atom_core.config import ModelConfig

_FLAG = "--speculative-config"
#: Names of fields that are flags of their own, too.
_SHORT = {"method": "--spec-method", "num-speculative-tokens": "--spec-tokens", "model": "--spec-model"}
#: vLLM's default of how many tokens a suffix may bring.
_SUFFIX_DEPTH = 24


class Speculation:
    """The fields of ``--speculative-config``, however a command gives them."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        """Read a command's flags, expanded."""
        self._flags = flags

    def field(self, name: str) -> str | None:
        """A field's value; None: not given."""
        value = self._flags.get(f"{_FLAG}.{name}") or self._flags.get(_SHORT.get(name, ""))
        return None if value in ("", "null") else value

    def number(self, name: str) -> int | None:
        """A field's value as a number; None: not given, or none."""
        value = self.field(name) or ""
        return int(value) if value.isdecimal() else None

    @property
    def method(self) -> str | None:
        """The method as vLLM takes it, "" if only vLLM can tell; None: nothing is drafted.

        It drafts by the layers for multi-token prediction of a model that has some, also where a draft model was asked
        for, and has older names for that, such as ``qwen3_next_mtp``.
        """
        method = self.field("method") or ""
        if not any(name.startswith(_FLAG) or name in _SHORT.values() for name in self._flags):
            return None
        if method.endswith("_mtp"):
            return own_layers.METHOD
        model = self.field("model") if method in ("", "draft_model") else None
        names = [] if model is None else _architectures(Path(model))
        if DRAFTS.keys() & set(names):
            return own_layers.METHOD
        return "draft_model" if MODELS.keys() & set(names) else method

    @property
    def num_drafts(self) -> int:
        """How many tokens are drafted at most, 0 if the command does not say."""
        count = self.number("num-speculative-tokens")
        if count is None and self.method == "suffix":
            count = self.number("suffix-decoding-max-tree-depth") or _SUFFIX_DEPTH
        return count or 0


def _architectures(folder: Path) -> list[str]:
    from atom_core.checkpoint import read_config_json  # imports torch

    if not (folder / "config.json").is_file():
        return []
    try:
        return list(read_config_json(folder).get("architectures") or ())
    except ValueError:
        return []


def check_own_layers(folder: Path, command: Command) -> Iterable[Finding]:
    """Layers to draft with that vLLM's command asks for, and that the checkpoint or other settings do not allow.

    Args:
        folder: the checkpoint.
        command: of the server.
    """
    flags = dict(expanded(command.flags))
    speculation = Speculation(flags)
    read = (
        read_model(folder, command) if command.framework is VLLM and speculation.method == own_layers.METHOD else None
    )
    if read is None:
        return
    values, config = read
    asked = own_layers.Asked(
        stages=pipeline_parallel_size(command),
        ranks=tensor_parallel_size(command),
        draft_ranks=speculation.number("draft-tensor-parallel-size"),
        cache_dtype=flags.get("--kv-cache-dtype", "auto"),
        draft_cache_dtype=speculation.field("kv-cache-dtype") if _says_cache_dtype(flags, values) else None,
        load_format=flags.get("--load-format", "auto"),
        head_quantization=speculation.field("draft-lm-head-quantization"),
    )
    reasons = [*own_layers.refusals(asked)]
    drafts = Path(speculation.field("model") or folder)
    if drafts.is_dir():
        others = said(lambda: _check_layers(drafts, config, asked, speculation.num_drafts))
        reasons += others if drafts == folder else [f"{drafts}: {reason}" for reason in others]
    for reason in reasons:
        yield Finding.of(reason, VLLM.refused, f"Leave {_FLAG} out, or {VLLM.otherwise} for this model.")


def _says_cache_dtype(flags: Mapping[str, str], values: Mapping[str, Any]) -> bool:
    """Whether the cache's dtype is known: without a flag, a quantised checkpoint may decide it."""
    return "--kv-cache-dtype" in flags or "quantization_config" not in of_text(values)


def _check_layers(folder: Path, target: ModelConfig, asked: own_layers.Asked, num_drafts: int) -> None:
    """Compare the layers to draft with that ``config.json`` counts with those in the files, and with the target.

    Raises:
        ValueError: they do not fit.
    """
    from atom_core.checkpoint import config_of  # imports torch
    from atom_core.loading import check_files
    from atom_core.models.registry import load_draft_class
    from atom_core.quant import read_quantization

    draft, values = load_draft_class(target.architecture), config_of(folder)
    own_layers.check_architecture(str(folder), values, target.architecture)
    config, key = draft.from_hf({**values, "architectures": [target.architecture]}), draft.count_key
    own_layers.check_sizes(str(folder), config, target)
    if of_text(values).get(key, config.num_layers) is None:
        raise ValueError(
            f"{key} is null in {folder / 'config.json'}, and vLLM takes a number alone. Set it to how many layers to "
            "draft with the files have, or leave speculative decoding by them out."
        )
    if num_drafts > config.num_layers and num_drafts % config.num_layers:
        raise ValueError(
            f"num_speculative_tokens={num_drafts} ({_FLAG}) is no multiple of {key}={config.num_layers} in "
            f"{folder / 'config.json'}, as vLLM wants it, whose layers take turns. Set it to one, or to less."
        )
    unread = asked.load_format in UNCHECKED_FORMATS
    check_files(config, None if unread else folder, asked.ranks, read_quantization(values))
