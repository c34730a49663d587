"""What SGLang should resolve differently for our models, or one clear reason why they cannot run what was asked for.

SGLang calls :func:`resolve` for each of our architectures while it makes sense of the server's arguments: in the
process that the user started, before any weight is loaded. It is registered for every user of an environment that has
this package, and does nothing unless ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.environ import envs

from atom_core.kernels.select import Target
from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import supported_architectures
from atom_core.quant import QuantConfig
from atom_plugin.common.flags import refusals
from atom_plugin.common.hub import folder_to_check
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import load_settings
from atom_plugin.sglang import BACKEND, MODEL_PACKAGE, our_backends
from atom_plugin.sglang.checkpoint_config import values_of
from atom_plugin.sglang.flags import OTHERWISE, TABLE
from atom_plugin.sglang.kernels import check_order
from atom_plugin.sglang.padding import to_be_padded
from atom_plugin.sglang.quantization import quantization_of
from atom_plugin.sglang.routed_experts import check_routed_experts
from atom_plugin.sglang.speculation import attention_ranks_of, check_drafts, check_own_layers

logger = logging.getLogger("sglang.atom_plugin")

_OWN_PREFIX = MODEL_PACKAGE.partition(".")[0]
_MODEL_MODULES = ("dense", "mixtures", "drafts")
#: Architectures of which SGLang lists the attention backends by name; those with sinks, which some backends lack.
LISTED = ("GptOssForCausalLM",)
#: A backend on each of these lists, on every device.
_STAND_IN = "triton"
#: Backends that do not say how long a padded request is, by which ranks with fewer requests than others are filled up.
_UNPADDED = {"torch_native", "flex_attention"}
_BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def resolve(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """What to change in ``server_args`` for a model of ``hf_config``; see SGLang's model overrides.

    Raises:
        ValueError: something asked for that our models cannot do; the message says what, and what is supported.
    """
    if not _asked_for():
        return {}
    # A bad ATOM_ variable is refused here, where the user sees it; names of ops and kernels depend on no device.
    settings = load_settings()
    check_order(settings)
    chosen_kernels(Target("cpu", ""), settings)
    architecture = hf_config.architectures[0]
    _check_registered(architecture)
    view = resolving_view(server_args)
    _refuse_by_table(server_args, view, os.environ)
    _refuse_parts(view)
    quant = _check_checkpoint(view, server_args, hf_config)
    prefill, decode = attention_backends_of(server_args)
    unnamed = prefill is None and decode is None
    if prefill != decode and not {prefill, decode}.isdisjoint(our_backends()):
        raise ValueError(
            f"Prefill on the attention backend {prefill!r} and decode on {decode!r} cannot be: our models run both on "
            f"{BACKEND!r} (--attention-backend {BACKEND}, or none named) or both on SGLang's."
        )
    if view.attn_dp_size > 1 and (unpadded := _UNPADDED & {prefill, decode}):
        raise ValueError(
            f"--attention-backend {', '.join(unpadded)} with --attn-dp-size {view.attn_dp_size} "
            "(--enable-dp-attention) cannot be: SGLang's backend takes no padded batches. Leave it out for "
            f"{BACKEND!r}, or name another."
        )
    if read_model_config(values_of(hf_config)).has_mla:
        _refuse_with_latents("" if unnamed else str(decode))
        check_own_layers(view, hf_config, quant)
    check_drafts(view, BACKEND if unnamed else str(decode), architecture)
    return {"attention_backend": BACKEND} if unnamed and architecture not in LISTED else {}


def _refuse_with_latents(attention: str) -> None:
    """Another backend than ours has no attention over latents for our models."""
    if attention and attention not in our_backends():
        raise ValueError(
            f"--attention-backend {attention} is not supported for our DeepSeek models, whose attention over latents "
            f"runs on {BACKEND!r} alone. Leave it out, or unset SGLANG_EXTERNAL_MODEL_PACKAGE."
        )


def resolve_beside_lists(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrap SGLang's step that resolves what a model needs, :func:`resolve` included.

    For the architectures of :data:`LISTED` that step ends with a list of the attention backends that there may be, to
    which nothing can be added. So ours is called by the name of one of them until the step is over.
    """
    if not _asked_for() or model_config_of(server_args).hf_config.architectures[0] not in LISTED:
        previous(server_args)
        return
    named = {name: getattr(server_args, name) for name in _BACKEND_FIELDS}
    ours = {name: value for name, value in named.items() if value == BACKEND}
    if not any(named.values()):
        ours = {"attention_backend": BACKEND}
    declare_resolution(server_args, __name__, **dict.fromkeys(ours, _STAND_IN))
    previous(server_args)
    declare_resolution(server_args, __name__, **ours)


def announce_native(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Say that SGLang's own model runs, where ours were asked for and there is none; nothing is changed."""
    if _asked_for():
        architecture = hf_config.architectures[0]
        supported = ", ".join(supported_architectures())
        logger.warning("atom-plugin has no model for %s (it has: %s): SGLang runs its own", architecture, supported)
    return {}


def _asked_for() -> bool:
    package = envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get()
    if package and package != MODEL_PACKAGE and package.partition(".")[0] == _OWN_PREFIX:
        raise ValueError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE={package} names no package with models of atom-plugin; set it to "
            f"{MODEL_PACKAGE}."
        )
    return bool(package == MODEL_PACKAGE)


def _check_registered(architecture: str) -> None:
    """SGLang only warns of a module that it cannot import, and runs its own model: so import it here first."""
    disabled = envs.SGLANG_DISABLED_MODEL_ARCHS.get()
    modules = {name: import_module(f"{MODEL_PACKAGE}.{name}") for name in _MODEL_MODULES if name not in disabled}
    if architecture not in {entry.__name__ for module in modules.values() for entry in module.EntryClass}:
        raise ValueError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE={MODEL_PACKAGE} asks for our {architecture}, but SGLang would not find it "
            f"there: SGLANG_DISABLED_MODEL_ARCHS={','.join(disabled)}. Unset one of the two variables."
        )


def _refuse_by_table(given: Any, view: Any, environ: Mapping[str, str]) -> None:
    """Refuse what the table of SGLang's settings says.

    Args:
        given: the server's arguments as the user gave them.
        view: the same, with what SGLang has resolved.
        environ: of the process.

    Raises:
        ValueError: a setting at a value that our models refuse.
    """
    for row in refusals(TABLE):
        owner, _, name = row.setting.rpartition(".")
        value = environ.get(name) if not owner else getattr(given if row.as_given else view, name)
        if row.is_refused(value) and (row.beside is None or row.beside(given)):
            raise ValueError(row.message(value, OTHERWISE))


def _refuse_parts(view: Any) -> None:
    """Layers and experts in other parts than our models can be in."""
    attention_ranks = attention_ranks_of(view)
    if view.moe_dense_tp_size not in (None, attention_ranks):
        raise ValueError(
            f"atom-plugin does not support --moe-dense-tp-size {view.moe_dense_tp_size}; layers that are no mixture "
            f"are in as many parts as attention ({attention_ranks}). {OTHERWISE}"
        )
    if view.ep_size not in (1, view.tp_size):
        raise ValueError(
            f"atom-plugin does not support --ep-size {view.ep_size} with --tp-size {view.tp_size}; it shares experts "
            f"out among all ranks of the tensor-parallel group (the same number) or none (1). {OTHERWISE}"
        )


def _check_checkpoint(view: Any, server_args: Any, hf_config: Any) -> QuantConfig:
    """Compare a local checkpoint's headers with our model and its quantisation, before anything is loaded.

    Returns:
        The quantisation.
    """
    quant = quantization_of(hf_config, view.quantization)
    config = read_model_config(values_of(hf_config))
    check_routed_experts(view, config)
    if view.attn_dp_size > 1 and not config.has_mixtures:
        raise ValueError(
            f"--attn-dp-size {view.attn_dp_size} (--enable-dp-attention) is for mixtures of experts, which are shared, "
            f"and {hf_config.architectures[0]} is none: --dp-size {view.attn_dp_size} alone, with a --tp-size of "
            f"{attention_ranks_of(view)}, serves it by replicas that need not wait for one another."
        )
    check_files(
        to_be_padded(config, view, attention_ranks_of(view), quant),
        folder_to_check(view.model_path, view.revision, view.download_dir, view.load_format),
        tensor_parallel_size=attention_ranks_of(view),
        quant=quant,
        expert_parallel=view.ep_size > 1,
        data_parallel_size=view.attn_dp_size,
    )
    dtype = model_config_of(server_args).dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"--dtype {dtype} is not supported; supported: bfloat16, float16, float32.")
    return quant
