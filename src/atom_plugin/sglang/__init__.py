"""The plug-in for SGLang: one entry point, which SGLang calls in each of its processes.

It runs for every user of an environment with this package, for every version of SGLang, before the command line is
parsed. Without ``SGLANG_EXTERNAL_MODEL_PACKAGE`` it registers the attention backend, and hooks on the backends of
drafts that act only if a draft uses ours. It imports nothing else of this package, and nothing that SGLang's own models
use. With the variable it also registers the overrides of server arguments for our architectures.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from atom_plugin import ALLOW_UNTESTED, UnsupportedFramework, import_failure, refusal, why_unsupported

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

logger = logging.getLogger("sglang.atom_plugin")

MODEL_PACKAGE = "atom_plugin.sglang.models"
PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
BACKEND = "atom"
#: Our entry point's name, for SGLANG_PLUGINS.
ENTRY_POINT = "atom"
#: SGLang's attention backend on ROCm; our models run on ours under this name too.
ROCM_BACKEND = "aiter"

#: SGLang's factory of draft backends has fixed tables of names inside two methods, and no registration. Plug-in hooks
#: on these methods are the only way to add a backend.
DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"

#: A model does not learn the folder of an update before it is read, and cannot turn its own error into the call's
#: result. Only hooks can do both.
WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

#: SGLang wraps the full attention of hybrid models in its own linear attention, which it chooses by the class of the
#: configuration. Its registry of such models is asked for other classes only.
HYBRID_ATTENTION = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"

#: Of a model with images only the text is ours. SGLang leaves out the images of a request to a model without them, and
#: says nothing. A prompt without a token ends its scheduler, and with it the server. It has no registration for checks
#: of requests.
REQUEST_CHECK = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"

#: Its ``check_weights`` reads the parameters, which may be in a kernel's own form; the hook restores the loaded form.
MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def is_registered() -> bool:
    """Whether our entry point has registered our attention backend in SGLang."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS.get(BACKEND) is _build_backend


def our_backends() -> tuple[str, ...]:
    """The names of attention backends with which our models run on ours."""
    from sglang.srt.utils import is_hip

    return (BACKEND, ROCM_BACKEND) if is_hip() else (BACKEND,)


def register() -> None:
    """Register ``--attention-backend atom`` and, if asked for, our architectures. Safe to call again.

    Settings are checked later, when SGLang resolves the server's arguments.

    Raises:
        SystemExit: our models are asked for and do not run with this SGLang. SGLang would log any other exception and
            serve its own model.
    """
    package = os.environ.get(PACKAGE_VARIABLE, "")
    asked = package.partition(".")[0] == MODEL_PACKAGE.partition(".")[0]
    asked_by = f"{PACKAGE_VARIABLE}={package}" if asked else f"--attention-backend {BACKEND}"
    reason = _refusal(asked_by)
    if reason and asked:
        raise SystemExit(reason)
    try:
        if is_registered():
            return
        _register_backend(reason)
        if reason is None:
            _register_for_drafts()
        if asked:
            _register_models()
    except (ImportError, AttributeError) as error:
        message = import_failure("sglang", asked_by, error)
        if asked:
            raise SystemExit(message) from error
        logger.debug("%s", message, exc_info=True)


def _refusal(asked_by: str) -> str | None:
    """Why our models or our attention do not run with this version of SGLang; None if they do."""
    try:
        from atom_plugin.common.settings import readable_settings

        if readable_settings(os.environ).allow_untested_framework:
            if untested := why_unsupported("sglang"):
                logger.warning("%s. It runs, untested, because %s is set.", untested, ALLOW_UNTESTED)
            return None
        return refusal("sglang", asked_by)
    except ImportError as error:
        return import_failure("sglang", asked_by, error)
    except ValueError as error:  # this package's own metadata is missing
        return f"{asked_by} cannot be served: {error}"


def _register_backend(reason: str | None) -> None:
    """Register our attention backend; with a ``reason``, one that raises it."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
        add_draft_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_build_backend if reason is None else partial(_refuse_backend, reason))


def _register_for_drafts() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{DRAFT_BACKENDS}.create_decode_backend", _draft_decode_backend, HookType.AROUND)
    HookRegistry.register(f"{DRAFT_BACKENDS}.create_draft_extend_backend", _draft_extend_backend, HookType.AROUND)


def _register_models() -> None:
    """Register the overrides of server arguments for our architectures, and the hooks on updates of weights."""
    from sglang.srt.arg_groups.model_override_base import register_model_override, register_model_override_predicate
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_hip

    from atom_core.models.registry import supported_architectures
    from atom_plugin.sglang.routing import announce_native, resolve, resolve_source, resolve_with_fixed_list

    if is_hip():
        register_attention_backend(ROCM_BACKEND)(partial(_build_for_our_models, ATTENTION_BACKENDS[ROCM_BACKEND]))
    supported = supported_architectures()
    for architecture in supported:
        register_model_override(architecture)(resolve)
    register_resolution_hook("handle_model_source_paths")(resolve_source)
    register_resolution_hook("handle_model_specific_adjustments")(resolve_with_fixed_list)
    register_model_override_predicate(lambda architecture: architecture not in supported)(announce_native)
    HookRegistry.register(f"{WEIGHT_UPDATER}.update_weights_from_disk", _update_from_disk, HookType.AROUND)
    HookRegistry.register(f"{WEIGHT_UPDATER}.update_weights_from_tensor", _update_from_tensor, HookType.AROUND)
    HookRegistry.register(f"{MODEL_RUNNER}.check_weights", _check_weights, HookType.AROUND)
    HookRegistry.register(HYBRID_ATTENTION, _wrap_attention, HookType.AROUND)
    HookRegistry.register(REQUEST_CHECK, _check_request, HookType.BEFORE)


def _build_backend(runner: ModelRunner) -> AttentionBackend:
    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    return AtomAttentionBackend(runner)


def _refuse_backend(reason: str, runner: ModelRunner) -> AttentionBackend:
    raise UnsupportedFramework(reason)


def _build_for_our_models(native: Callable[[ModelRunner], AttentionBackend], runner: ModelRunner) -> AttentionBackend:
    from atom_plugin.sglang.updates import AtomModel

    return _build_backend(runner) if isinstance(runner.model, AtomModel) else native(runner)


def _wrap_attention(original: Callable[..., Any], runner: ModelRunner, full_attn_backend: AttentionBackend) -> Any:
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    from atom_plugin.sglang.updates import AtomModel

    if not isinstance(runner.model, AtomModel) or hybrid_gdn_config(runner.model_config) is None:
        return original(runner, full_attn_backend)
    from atom_plugin.sglang.attention_backend.linear import wrap_attention

    return wrap_attention(runner, full_attn_backend)


def _check_request(manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    from atom_plugin.sglang.requests import refuse_empty, refuse_media

    refuse_media(manager.model_config, request)
    refuse_empty(manager.model_config, request, input_ids)


def _draft_decode_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> Any:
    if not _names_ours(factory):
        return original(factory)
    from atom_plugin.sglang.drafts import create_decode_backend

    return create_decode_backend(original, factory)


def _draft_extend_backend(original: Callable[..., Any], factory: DraftBackendFactory) -> Any:
    if not _names_ours(factory):
        return original(factory)
    from atom_plugin.sglang.drafts import create_draft_extend_backend

    return create_draft_extend_backend(original, factory)


def _update_from_disk(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from atom_plugin.sglang.updates import update_from_disk

    return update_from_disk(original, *args, **kwargs)


def _update_from_tensor(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from atom_plugin.sglang.updates import update_from_tensor

    return update_from_tensor(original, *args, **kwargs)


def _check_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from atom_plugin.sglang.updates import check_weights

    return check_weights(original, *args, **kwargs)


def _names_ours(factory: DraftBackendFactory) -> bool:
    """Whether a draft may use our attention. Nothing of ours is imported for one that does not."""
    from sglang.srt.runtime_context import attention_backends

    return not {factory.draft_attn_backend, *attention_backends()}.isdisjoint(our_backends())
