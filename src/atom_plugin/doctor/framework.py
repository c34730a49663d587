"""What the doctor knows of each framework: how a user asks for our models, and what happens after a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atom_plugin.common.flags import Refused, refusals
from atom_plugin.sglang import MODEL_PACKAGE, PACKAGE_VARIABLE
from atom_plugin.sglang.flags import TABLE as SGLANG_FLAGS
from atom_plugin.vllm.flags import on_the_command_line

PLUGIN_NAME = "atom"


@dataclass(frozen=True)
class Framework:
    """A framework, with the texts of the doctor's findings."""

    package: str
    title: str
    asked: str
    """How a user asks for our models."""
    otherwise: str
    """How a user asks for the framework's own model."""
    refused: str
    """What happens if we refuse."""
    unknown_architecture: str
    """What happens with a checkpoint of an unsupported architecture."""
    left_out: str
    """What happens if our entry point does not run."""
    entry_points: Mapping[str, str]
    """Our entry points by group, as in pyproject.toml."""
    refusals: tuple[Refused, ...]


VLLM = Framework(
    package="vllm",
    title="vLLM",
    asked="`--model-impl atom`",
    otherwise="use --model-impl auto",
    refused="`--model-impl atom` refuses to start.",
    unknown_architecture="`--model-impl atom` refuses to start.",
    left_out="vLLM silently runs its own model, also with `--model-impl atom`.",
    entry_points={
        "vllm.platform_plugins": "atom_plugin.vllm:register_platform",
        "vllm.general_plugins": "atom_plugin.vllm:register_models",
    },
    refusals=on_the_command_line(),
)
SGLANG = Framework(
    package="sglang",
    title="SGLang",
    asked=f"{PACKAGE_VARIABLE}={MODEL_PACKAGE}",
    otherwise=f"unset {PACKAGE_VARIABLE}",
    refused="SGLang, asked for our models, refuses to start.",
    unknown_architecture="SGLang runs its own model, with a warning in its log.",
    left_out="SGLang does not know `--attention-backend atom`, and our models refuse to be built.",
    entry_points={"sglang.srt.plugins": "atom_plugin.sglang:register"},
    refusals=tuple(refusals(SGLANG_FLAGS)),
)
FRAMEWORKS = (VLLM, SGLANG)
