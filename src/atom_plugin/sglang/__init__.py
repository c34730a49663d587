"""The entry point that SGLang calls in each of its processes; importing this module imports neither torch nor SGLang.

It runs for every user of an environment that has this package, before the command line is parsed. It only registers:
the attention backend's name and factory; for each of our architectures what SGLang should resolve differently, which
acts only while ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names our package, and with it a wrapper of the step in which SGLang
lists the attention backends of some architectures; and two hooks for the backends of drafts, which act only where a
draft runs on our backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

MODEL_PACKAGE = "atom_plugin.sglang.models"
BACKEND = "atom"
#: On ROCm SGLang users know the attention of our kernels' library by this name; there it is ours for our models.
ROCM_BACKEND = "aiter"

#: SGLang's factory of the backends of drafts looks names up in tables inside two of its methods, and offers no
#: registration: hooks on these, which SGLang has for plug-ins, are the only way to be found there.
DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"

_registered = False


def our_backends() -> tuple[str, ...]:
    """The names under which our models get our attention."""
    from sglang.srt.utils import is_hip

    return (BACKEND, ROCM_BACKEND) if is_hip() else (BACKEND,)


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
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.utils import is_hip

    from atom_core.models.registry import supported_architectures
    from atom_plugin.sglang.routing import announce_native, resolve, resolve_beside_lists

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
        add_draft_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_build_backend)
    if is_hip():
        register_attention_backend(ROCM_BACKEND)(partial(_build_for_our_models, ATTENTION_BACKENDS[ROCM_BACKEND]))
    HookRegistry.register(f"{DRAFT_BACKENDS}.create_decode_backend", _draft_decode_backend, HookType.AROUND)
    HookRegistry.register(f"{DRAFT_BACKENDS}.create_draft_extend_backend", _draft_extend_backend, HookType.AROUND)
    supported = supported_architectures()
    for architecture in supported:
        register_model_override(architecture)(resolve)
    register_resolution_hook("handle_model_specific_adjustments")(resolve_beside_lists)
    register_model_override_predicate(lambda architecture: architecture not in supported)(announce_native)


def _build_backend(runner: ModelRunner) -> AttentionBackend:
    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    return AtomAttentionBackend(runner)


def _build_for_our_models(native: Callable[[ModelRunner], AttentionBackend], runner: ModelRunner) -> AttentionBackend:
    from atom_plugin.sglang.causal_lm import AtomModel

    return _build_backend(runner) if isinstance(runner.model, AtomModel) else native(runner)


def _draft_decode_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> Any:
    from atom_plugin.sglang.drafts import create_decode_backend

    return create_decode_backend(original, factory)


def _draft_extend_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> Any:
    from atom_plugin.sglang.drafts import create_draft_extend_backend

    return create_draft_extend_backend(original, factory)
