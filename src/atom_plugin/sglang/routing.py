"""The overrides of SGLang's server arguments for our models, or one clear reason why they cannot run.

SGLang calls :func:`resolve` for our architectures while it resolves the server's arguments: in the process that the
user started, before any weight is loaded. It does nothing unless ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names our package.
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
from atom_plugin.sglang.gpu_kernels import gpu_kernels
from atom_plugin.sglang.hybrid import check_states, resolve_hybrid
from atom_plugin.sglang.hybrids import check_data_parallel
from atom_plugin.sglang.kernels import check_order
from atom_plugin.sglang.padding import to_be_padded
from atom_plugin.sglang.quantization import quantization_of
from atom_plugin.sglang.routed_experts import check_routed_experts
from atom_plugin.sglang.speculation import attention_ranks_of, check_drafts, check_own_layers

logger = logging.getLogger("sglang.atom_plugin")

_OWN_PREFIX = MODEL_PACKAGE.partition(".")[0]
_MODEL_MODULES = ("dense", "mixtures", "hybrids", "drafts")
#: Architectures for which SGLang has a fixed list of attention backends: those with sinks, which some backends lack.
LISTED = ("GptOssForCausalLM",)
#: A backend that is on each of these lists, on every device.
_STAND_IN = "triton"
#: Backends without a length for padded requests, which fill up data-parallel ranks with fewer requests than others.
_UNPADDED = {"torch_native", "flex_attention"}
_BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def resolve(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """The overrides of ``server_args`` for a model of ``hf_config``; see SGLang's model overrides.

    Raises:
        ValueError: a setting that our models do not support; the message names it and what is supported.
    """
    if not _asked_for():
        return {}
    # A bad ATOM_ variable is refused here, where the user sees it. All devices have the same names of ops and kernels.
    settings = load_settings()
    check_order(settings)
    chosen_kernels(Target("cpu", ""), settings, gpu_kernels())
    architecture = hf_config.architectures[0]
    _check_registered(architecture)
    view = resolving_view(server_args)
    _refuse_by_table(server_args, view, os.environ)
    _refuse_shards(view)
    quant = _check_checkpoint(view, server_args, hf_config)
    prefill, decode = attention_backends_of(server_args)
    unnamed = prefill is None and decode is None
    if prefill != decode and not {prefill, decode}.isdisjoint(our_backends()):
        raise ValueError(
            f"Prefill on attention backend {prefill!r} with decode on {decode!r} is not supported: our models run both "
            f"on {BACKEND!r} (--attention-backend {BACKEND}, or no flag) or both on SGLang's."
        )
    if view.attn_dp_size > 1 and (unpadded := _UNPADDED & {prefill, decode}):
        raise ValueError(
            f"--attention-backend {', '.join(unpadded)} with --attn-dp-size {view.attn_dp_size} "
            "(--enable-dp-attention) is not supported: SGLang's backend takes no padded batches. Leave it out to use "
            f"{BACKEND!r}, or name another."
        )
    config = read_model_config(values_of(hf_config))
    if config.has_mla:
        _refuse_with_latents("" if unnamed else str(decode))
    attention = BACKEND if unnamed else str(decode)
    if config.has_mla or config.has_states:
        check_own_layers(view, hf_config, quant)
    if config.has_states:
        check_states(view, hf_config, attention)
    check_drafts(view, attention, architecture)
    return {"attention_backend": BACKEND} if unnamed and architecture not in LISTED else {}


def _refuse_with_latents(attention: str) -> None:
    """Refuse other attention backends than ours for MLA."""
    if attention and attention not in our_backends():
        raise ValueError(
            f"--attention-backend {attention} is not supported for our DeepSeek models, whose attention (MLA) runs "
            f"on {BACKEND!r} only. Leave it out, or unset SGLANG_EXTERNAL_MODEL_PACKAGE."
        )


def resolve_with_fixed_list(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrap SGLang's step that resolves a model's settings, :func:`resolve` included.

    For the architectures of :data:`LISTED` that step checks the attention backend against a fixed list. So our backend
    has the name of one on the list until the step is over.
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


def resolve_source(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrap SGLang's step that finds the model's folder, after which SGLang reads its configuration."""
    previous(server_args)
    if _asked_for():
        resolve_hybrid(server_args)


def announce_native(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Log that SGLang's own model runs, if ours are asked for and we have none; nothing is overridden."""
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
    """Import our model modules: if SGLang cannot import one, it only logs a warning and runs its own model."""
    disabled = envs.SGLANG_DISABLED_MODEL_ARCHS.get()
    modules = {name: import_module(f"{MODEL_PACKAGE}.{name}") for name in _MODEL_MODULES if name not in disabled}
    if architecture not in {entry.__name__ for module in modules.values() for entry in module.EntryClass}:
        raise ValueError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE={MODEL_PACKAGE} asks for our {architecture}, but SGLang would not find it "
            f"there: SGLANG_DISABLED_MODEL_ARCHS={','.join(disabled)}. Unset one of the two variables."
        )


def _refuse_by_table(given: Any, view: Any, environ: Mapping[str, str]) -> None:
    """Refuse the settings that the table of SGLang's settings refuses.

    Args:
        given: the server's arguments as the user gave them.
        view: the arguments as SGLang has resolved them.
        environ: of the process.

    Raises:
        ValueError: a setting at a value that our models refuse.
    """
    for row in refusals(TABLE):
        owner, _, name = row.setting.rpartition(".")
        value = environ.get(name) if not owner else getattr(given if row.as_given else view, name)
        if row.is_refused(value) and (row.only_if is None or row.only_if(given)):
            raise ValueError(row.message(value, OTHERWISE))


def _refuse_shards(view: Any) -> None:
    """Refuse ways to shard dense layers and experts that our models do not support."""
    attention_ranks = attention_ranks_of(view)
    if view.moe_dense_tp_size not in (None, attention_ranks):
        raise ValueError(
            f"atom-plugin does not support --moe-dense-tp-size {view.moe_dense_tp_size}; dense layers have as many "
            f"shards as attention ({attention_ranks}). {OTHERWISE}"
        )
    if view.ep_size not in (1, view.tp_size):
        raise ValueError(
            f"atom-plugin does not support --ep-size {view.ep_size} with --tp-size {view.tp_size}; it supports the "
            f"same number (experts are split over all ranks) or 1 (each expert is sharded). {OTHERWISE}"
        )


def _check_checkpoint(view: Any, server_args: Any, hf_config: Any) -> QuantConfig:
    """Compare a local checkpoint's headers with our model and its quantisation, before anything is loaded.

    Returns:
        The quantisation.
    """
    quant = quantization_of(hf_config, view.quantization)
    config = read_model_config(values_of(hf_config))
    check_routed_experts(view, config)
    check_data_parallel(config, int(view.tp_size), int(view.attn_dp_size))
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
