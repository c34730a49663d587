"""Checks of a command for models with linear attention and for checkpoints with images, by the adapters' own rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from atom_core.language_model import of_text
from atom_plugin.common.settings import readable_settings
from atom_plugin.common.versions import installed
from atom_plugin.doctor.checkpoint import read_model, said
from atom_plugin.doctor.command import Command, expanded, is_off, is_on, pipeline_parallel_size
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import SGLANG, VLLM
from atom_plugin.doctor.speculation import Speculation
from atom_plugin.sglang import BACKEND, ROCM_BACKEND
from atom_plugin.sglang.hybrids import (
    OWN_LAYERS,
    check_data_parallel,
    interval_of,
    refused_in_configuration,
    refused_with_own_drafts,
    refused_with_states,
)
from atom_plugin.vllm.flags import refused
from atom_plugin.vllm.hybrids import (
    BY_NGRAMS,
    NEWER_RUNNER_DRAFTS_BY_NGRAMS,
    ON_OLDER_RUNNER,
    Asked,
    refusals,
    refused_stages,
    stages_of,
)

if TYPE_CHECKING:
    from atom_core.config import ModelConfig
    from atom_core.kernels.select import Target

#: vLLM's variable that chooses a model runner. Without it vLLM takes the newer one where there is Triton.
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
#: vLLM's variable that says how many layers each pipeline stage has.
_PARTITION = "VLLM_PP_LAYER_PARTITION"
#: Other flags of SGLang's server arguments.
_ALIASES = {
    "attn_dp_size": ("--attention-data-parallel-size",),
    "dp_size": ("--data-parallel-size", "--dp"),
    "ep_size": ("--expert-parallel-size", "--ep"),
    "tp_size": ("--tensor-parallel-size", "--tp"),
    "pp_size": ("--pipeline-parallel-size", "--pp"),
}
_NUMBERS = (*_ALIASES, "page_size", "tokenizer_worker_num")
_OURS = (BACKEND, ROCM_BACKEND)
_STATE_DTYPE = "SGLANG_MAMBA_SSM_DTYPE"


def check_images(folder: Path, command: Command) -> Iterable[Finding]:
    """A checkpoint with images whose command does not ask for its text alone."""
    read = read_model(folder, command)
    if read is None or of_text(read[0]) is read[0]:
        return
    if command.framework is VLLM and not is_on(command.flags, "--language-model-only"):
        row = refused("ModelConfig.multimodal_config")
        problem = f"{folder} is a checkpoint with images: atom-plugin does not support {row.what}."
        yield Finding(problem, VLLM.refused, row.instead)


def check_states(folder: Path, command: Command, environ: Mapping[str, str], target: Target) -> Iterable[Finding]:
    """What vLLM's command asks for and models with linear attention do not support.

    Args:
        folder: the checkpoint.
        command: of the server.
        environ: the variables that it sees.
        target: the device that it would run on.
    """
    read = read_model(folder, command) if command.framework is VLLM else None
    if read is None or not read[1].has_states:
        return
    flags = dict(expanded(command.flags))
    speculation = Speculation(flags)
    asked = Asked(
        on_vllms_attention=readable_settings(environ).disable_vllm_attention,
        caches_prefixes="--no-enable-prefix-caching" not in flags,
        older_runner=_is_older_runner(environ.get(_RUNNER), target, speculation.method),
        state_dtype=_state_dtype(flags, read[0], folder),
        num_drafts=speculation.num_drafts,
        draft_method=speculation.method,
    )
    reasons = (*refusals(asked), *_refused_stages(read[1], pipeline_parallel_size(command), environ.get(_PARTITION)))
    for reason in reasons:
        yield Finding.of(reason, VLLM.refused, f"Leave it out, or {VLLM.otherwise} for this model.")


def check_sglang_settings(folder: Path, command: Command, target: Target) -> Iterable[Finding]:
    """What SGLang's command asks for, and the model of a checkpoint does not support.

    Args:
        folder: the checkpoint.
        command: of the server.
        target: the device that it would run on, if the command names none.
    """
    read = read_model(folder, command) if command.framework is SGLANG else None
    if read is None:
        return
    given, (values, config) = ServerArguments(command), read
    reasons = said(lambda: check_data_parallel(config, given.tp_size or 1, data_parallel_attention(given)))
    if config.has_states:
        has_images = of_text(values) is not values
        reasons += refused_in_configuration(given, config.architecture, given.device or target.kind, has_images)
    for reason in reasons:
        yield Finding.of(reason, SGLANG.refused, f"Leave it out, or {SGLANG.otherwise} for this model.")


def data_parallel_attention(given: ServerArguments) -> int:
    """The groups of ranks among which SGLang shares requests out within a model."""
    # --enable-dp-attention with --dp-size is its older way to say --attn-dp-size.
    return given.attn_dp_size or (given.dp_size if given.enable_dp_attention else None) or 1


def check_sglang_drafts(folder: Path, command: Command, environ: Mapping[str, str]) -> Iterable[Finding]:
    """What SGLang's command asks for, and models that draft by layers of their own do not support.

    These are DeepSeek's and those with linear attention, of which more is refused.

    Args:
        folder: the checkpoint.
        command: of the server.
        environ: the variables that it sees.
    """
    from atom_core.loading import check_files  # imports torch
    from atom_core.models.registry import load_draft_class
    from atom_core.quant import read_quantization

    read = read_model(folder, command) if command.framework is SGLANG else None
    if read is None or not (read[1].has_states or read[1].has_mla):
        return
    given, (values, config) = ServerArguments(command), read
    reasons: list[str] = []
    if config.has_states:
        text = of_text(values)
        dtype = environ.get(_STATE_DTYPE) or text.get("mamba_ssm_dtype")
        attention = given.attention_backend or given.decode_attention_backend or BACKEND
        reasons += refused_with_states(given, attention, _OURS, dtype)
        reasons += said(lambda: interval_of(config.architecture, text))
    reasons += refused_with_own_drafts(given, config.architecture, _OURS)
    if given.speculative_algorithm in OWN_LAYERS:
        draft = load_draft_class(config.architecture)
        reasons += said(
            lambda: check_files(draft.from_hf(values), folder, given.tp_size or 1, read_quantization(values))
        )
    for reason in reasons:
        yield Finding.of(reason, SGLANG.refused, f"Use another checkpoint, or {SGLANG.otherwise} for this model.")


class ServerArguments:
    """A command's arguments by the names of SGLang's fields: numbers, true, text, what JSON says; None: not given."""

    def __init__(self, command: Command) -> None:
        self._flags = dict(command.flags)
        self.model_path = command.model

    def __getattr__(self, name: str) -> Any:
        flag = f"--{name.replace('_', '-')}"
        value = next((self._flags[it] for it in (flag, *_ALIASES.get(name, ())) if it in self._flags), None)
        if value is None:
            return None
        try:
            read = json.loads(value) if value else True
        except ValueError:
            read = value
        # SGLang's own parser refuses a number that is none.
        return None if name in _NUMBERS and not isinstance(read, int) else read


def _is_older_runner(variable: str | None, target: Target, draft_method: str | None) -> bool:
    if variable is not None:
        return is_off(variable.strip())
    vllm = installed("vllm")
    by_ngrams = vllm is not None and Version(vllm.version).release < NEWER_RUNNER_DRAFTS_BY_NGRAMS
    older = (*ON_OLDER_RUNNER, *(BY_NGRAMS if by_ngrams else ()))
    return target.kind == "cpu" or draft_method in older


def _refused_stages(config: ModelConfig, count: int, partition: str | None) -> Iterable[str]:
    from atom_core.config import AttentionConfig  # imports torch

    full = [isinstance(layer.mixer, AttentionConfig) for layer in config.layers]
    try:
        stages = stages_of(len(full), count, partition)
    except ValueError as error:
        return (str(error),)
    return refused_stages(full, stages)


def _state_dtype(flags: Mapping[str, str], values: Mapping[str, Any], folder: Path) -> str:
    """As vLLM chooses it: by the first that says."""
    given = (
        flags.get("--mamba-ssm-cache-dtype"),
        of_text(values).get("mamba_ssm_dtype"),
        flags.get("--mamba-cache-dtype"),
        flags.get("--dtype"),
    )
    name = next((it for it in given if it not in (None, "auto")), None) or _dtype_of(values, folder)
    return {"half": "float16", "float": "float32"}.get(name, name)


def _dtype_of(values: Mapping[str, Any], folder: Path) -> str:
    """A checkpoint's dtype as vLLM reads it: what the whole configuration says, then its parts, then the files."""
    from atom_core.checkpoint import Checkpoint  # imports torch

    for part in (values, of_text(values), values.get("vision_config")):
        if not isinstance(part, Mapping):
            continue
        if name := part.get("dtype") or part.get("torch_dtype"):
            return str(name)
    try:
        stored = {tensor.dtype for tensor in Checkpoint.open(folder).tensors.values()}
    except ValueError:  # check_checkpoint says what is wrong
        stored = set()
    return "float16" if stored == {"F16"} else "bfloat16"
