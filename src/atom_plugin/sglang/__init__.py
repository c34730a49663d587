"""The entry point that SGLang calls in each of its processes; importing this module imports neither torch nor SGLang.

It runs for every user of an environment that has this package, before the command line is parsed. It only registers:
the attention backend's name and factory, and for each of our architectures what SGLang should resolve differently. The
latter acts only while ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names our package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

MODEL_PACKAGE = "atom_plugin.sglang.models"
BACKEND = "atom"

_registered = False


def register() -> None:
    """Make ``--attention-backend atom`` known and announce our architectures; safe to call again.

    SGLang logs an exception from here and goes on without us, so nothing is checked here: what is wrong with a setting
    is said when the server's arguments are resolved, which is where users see it.
    """
    global _registered  # noqa: PLW0603 - a process registers once, as SGLang loads plug-ins once
    if _registered:
        return
    _registered = True
    from sglang.srt.arg_groups.model_override_base import register_model_override, register_model_override_predicate
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )

    from atom_core.models.registry import supported_architectures
    from atom_plugin.sglang.routing import announce_native, resolve

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
        add_draft_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_build_backend)
    supported = supported_architectures()
    for architecture in supported:
        register_model_override(architecture)(resolve)
    register_model_override_predicate(lambda architecture: architecture not in supported)(announce_native)


def _build_backend(runner: ModelRunner) -> AttentionBackend:
    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    return AtomAttentionBackend(runner)
