"""``--model-impl atom``: replaces a checkpoint's architecture with our class, or raises one clear reason why not.

Three fields of vLLM's ModelConfig are rewritten, as vLLM itself does for drafts: ``hf_config.architectures``,
``_model_info`` and ``_architecture``. All refusals happen while the configuration is built: before any weight is
loaded, in the process that the user started. The table in :mod:`atom_plugin.vllm.flags` has the settings that are
refused by their value.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from atom_core.config import ModelConfig as CoreConfig
from atom_core.loading import check_files
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import (
    DRAFTS,
    MODELS,
    load_draft_class,
    supported_architectures,
    unsupported_architecture,
)
from atom_plugin.common.checkpoint_config import check_overrides, file_values
from atom_plugin.common.flags import Refused
from atom_plugin.common.hub import folder_to_check
from atom_plugin.common.settings import PREFIX, Settings, load_settings
from atom_plugin.common.versions import DISTRIBUTION, installed
from atom_plugin.vllm import ARCHITECTURE_PREFIX, own_layers
from atom_plugin.vllm.checkpoint_config import values_of, values_of_draft
from atom_plugin.vllm.flags import DRAFT, EXCHANGES, OTHERWISE, OWNERS, refused, refused_by_value
from atom_plugin.vllm.hybrids import Asked, refusals, refused_stages
from atom_plugin.vllm.quantization import quantization_of
from atom_plugin.vllm.routed_experts import returns_routed_experts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.atom_plugin")

#: vLLM's own default on a CPU (``CpuPlatform.update_block_size_for_backend``).
_CPU_BLOCK_SIZE = 128
#: Keys of rope that say how three rows of positions are used.
_MROPE = ("mrope_section", "mrope_interleaved")


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse what our models do not support, while all values are the user's own and no default is filled in.

    Raises:
        ValueError: a setting that our models do not support; the message names it and what is supported.
    """
    if _is_ours(vllm_config.model_config):
        return
    settings = load_settings()  # a bad ATOM_ variable is refused here, where the user sees it
    _refuse_platform()
    _supported_architecture(vllm_config.model_config)
    _refuse_by(refused_by_value(), vllm_config, settings)


def route(vllm_config: VllmConfig) -> None:
    """Route the model of ``vllm_config``, and its draft if we have one, to our classes. Safe to call again.

    Raises:
        ValueError: settings that :func:`refuse` accepts do not fit the checkpoint or each other.
    """
    model_config = vllm_config.model_config
    if _is_ours(model_config):
        return
    settings = load_settings()
    architecture = _supported_architecture(model_config)
    if vllm_config.load_config.load_format in ("auto", "hf"):
        # vLLM would fall back to *.bin pickles if a repository has no safetensors.
        vllm_config.load_config.load_format = "safetensors"
    if isinstance(given := model_config.hf_overrides, Mapping):
        file = file_values(str(model_config.model), model_config.revision)
        check_overrides("--hf-overrides", given, file, architecture)
    _serve_text_only(model_config)
    _take_cache_dtype_of_checkpoint(vllm_config)
    _set_cpu_block_size(vllm_config)
    _check_checkpoint(vllm_config, architecture)
    _check_states(vllm_config)
    _check_own_layers(vllm_config, architecture)
    _rewrite(model_config, architecture)
    _route_draft(vllm_config, architecture, settings)
    _mark_compile_cache(vllm_config, settings)


def _is_ours(model_config: ModelConfig) -> bool:
    architectures = getattr(model_config.hf_config, "architectures", None) or [""]
    return bool(architectures[0].startswith(ARCHITECTURE_PREFIX))


def _supported_architecture(model_config: ModelConfig) -> str:
    names = list(model_config.model_arch_config.architectures or [])
    for name in names:
        if name in MODELS:
            return name
    raise ValueError(
        f"--model-impl atom has no model for the architecture {', '.join(names) or '(none named)'}; "
        f"supported: {', '.join(supported_architectures())}. Leave --model-impl out to run vLLM's own model."
    )


def _refuse_platform() -> None:
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise ValueError(
            f"--model-impl atom runs on CPU, CUDA and ROCm; vLLM's platform here is {current_platform.device_name!r}."
        )


def _refuse_by(rows: Iterable[Refused], vllm_config: VllmConfig, settings: Settings) -> None:
    for row in rows:
        if row.unless and getattr(settings, row.unless.removeprefix(PREFIX).lower()):
            continue
        value = value_of(row.setting, vllm_config)
        if value is not None and row.is_refused(value):
            raise ValueError(row.message(value, OTHERWISE))


def value_of(setting: str, vllm_config: VllmConfig) -> Any:
    """The value of a setting of the table as the user gave it; None if it is unset or unknown to this vLLM.

    An enum member is returned as its name, and a configuration object as True.
    """
    owner, _, name = setting.rpartition(".")
    if not owner:
        return _variable(name)
    owned = reduce(lambda it, field: getattr(it, field, None), filter(None, OWNERS[owner].split(".")), vllm_config)
    value = owned.get(name) if isinstance(owned, dict) else getattr(owned, name, None)
    if setting == "ModelConfig.runner":  # "auto" depends on the architecture and --convert
        return vllm_config.model_config.runner_type
    if setting == "CacheConfig.block_size" and not getattr(owned, "user_specified_block_size", False):
        return None
    if setting == "ModelConfig.multimodal_config" and getattr(value, "language_model_only", False):
        return None  # vLLM has the object, and only text is served
    if setting == "SpeculativeConfig.draft_load_config":
        return None if value is None else value.load_format
    if isinstance(value, Enum):
        return value.name
    return True if is_dataclass(value) else value


def _variable(name: str) -> Any:
    from vllm import envs
    from vllm.platforms import current_platform

    if name.startswith("VLLM_ROCM_") and not current_platform.is_rocm():
        return None  # no model reads it there
    return getattr(envs, name) if name in envs.environment_variables and envs.is_set(name) else None


def _take_cache_dtype_of_checkpoint(vllm_config: VllmConfig) -> None:
    """Use an FP8 cache if a compressed-tensors checkpoint asks for one and the user sets no dtype.

    vLLM does this when it builds its own attention layer. Other formats that ask for an FP8 cache are read by now.
    """
    scheme, cache = getattr(vllm_config.quant_config, "kv_cache_scheme", None), vllm_config.cache_config
    if not scheme or cache.cache_dtype != "auto":
        return
    found = {name: scheme.get(name) for name in ("type", "num_bits", "strategy", "symmetric")}
    if found != {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}:
        raise ValueError(
            f"The checkpoint's kv_cache_scheme is {found}; --model-impl atom supports symmetric 8-bit floating point "
            "with one scale a tensor. Set --kv-cache-dtype to override it."
        )
    cache.cache_dtype = "fp8"


def _serve_text_only(model_config: ModelConfig) -> None:
    """Make ``model_config`` that of a text model; a multimodal checkpoint is given with ``--language-model-only``.

    Text has one position in all three rows of M-RoPE, which is plain rope. vLLM removes the keys of M-RoPE by itself
    from checkpoints that are text only.
    """
    model_config.multimodal_config = None
    for config in (model_config.hf_config, model_config.hf_text_config):
        rope = getattr(config, "rope_parameters", None) or {}
        for key in _MROPE:
            rope.pop(key, None)


def _check_states(vllm_config: VllmConfig) -> None:
    """Refuse what models that keep states do not support."""
    if not vllm_config.model_config.is_hybrid:
        return
    from vllm.distributed.utils import get_pp_indices

    from atom_plugin.vllm.states import state_dtypes  # a slow import

    stages = vllm_config.parallel_config.pipeline_parallel_size
    config = vllm_config.model_config.hf_text_config
    full = [kind == "full_attention" for kind in config.layer_types[: config.num_hidden_layers]]
    bounds = [get_pp_indices(len(full), stage, stages) for stage in range(stages)]
    for reason in refused_stages(full, bounds):
        raise ValueError(reason)
    cache, speculative = vllm_config.cache_config, vllm_config.speculative_config
    asked = Asked(
        on_vllms_attention=load_settings().disable_vllm_attention,
        caches_prefixes=cache.mamba_cache_mode == "align",
        older_runner=not vllm_config.use_v2_model_runner,
        state_dtype=_name(state_dtypes(vllm_config)[1]),
        num_drafts=vllm_config.num_speculative_tokens,
        draft_method=None if speculative is None else speculative.method,
    )
    for reason in refusals(asked):
        raise ValueError(reason)


def _set_cpu_block_size(vllm_config: VllmConfig) -> None:
    """Set the block size that vLLM prefers on a CPU, unless the user gave ``--block-size``.

    Our layers choose their kernels when the model is built, and vLLM's CPU kernels need blocks of 32 tokens or more.
    Since 0.33 vLLM sets the size only after the model is built; before that it is 16.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if current_platform.is_cpu() and not vllm_config.model_config.use_mla and not cache.user_specified_block_size:
        cache.block_size = _CPU_BLOCK_SIZE


def _check_checkpoint(vllm_config: VllmConfig, architecture: str) -> None:
    """Compare a local checkpoint's headers with our model and its quantisation, before anything is loaded.

    For a model that is not downloaded yet, only the file names are checked; the rest is compared at loading.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    quant = quantization_of(model_config)
    config = read_model_config(values_of(model_config, architecture))
    if config.has_mla:
        _check_latents(vllm_config)
    load = vllm_config.load_config
    _check_routed_experts(vllm_config, config)
    dp_size = parallel.data_parallel_size if config.has_mixtures else 1
    if dp_size > 1:
        _check_exchange(vllm_config)
    check_files(
        config,
        folder_to_check(str(model_config.model), model_config.revision, load.download_dir, str(load.load_format)),
        tensor_parallel_size=parallel.tensor_parallel_size,
        quant=quant,
        expert_parallel=parallel.enable_expert_parallel,
        data_parallel_size=dp_size,
    )
    if model_config.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"--dtype {model_config.dtype} is not supported; supported: bfloat16, float16, float32.")
    if model_config.head_dtype not in (model_config.dtype, torch.float32):
        raise ValueError(
            f"head_dtype {_name(model_config.head_dtype)} (--hf-overrides) with --dtype {_name(model_config.dtype)} is "
            f"not supported by --model-impl atom; supported: float32, {_name(model_config.dtype)}."
        )


def _check_routed_experts(vllm_config: VllmConfig, config: CoreConfig) -> None:
    """Refuse ``--enable-return-routed-experts`` for models that cannot report their experts."""
    if not returns_routed_experts(vllm_config):
        return
    from atom_plugin.vllm.attention import is_compiled  # a slow import, rarely needed

    if not config.has_mixtures:
        raise ValueError(
            f"--enable-return-routed-experts is for mixtures of experts, and this {config.architecture} is not one. "
            "Leave it out."
        )
    if vllm_config.compilation_config.mode is not None and is_compiled(vllm_config):
        raise ValueError(
            "--model-impl atom does not support --enable-return-routed-experts with a model that is compiled "
            "(-cc.mode=3, -O1, -O3): compiled code cannot return them. Leave the mode out."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_latents(vllm_config: VllmConfig) -> None:
    """Refuse what MLA does not support: only our attention layer runs it, and target and draft share its cache."""
    model_config, speculative = vllm_config.model_config, vllm_config.speculative_config
    if speculative is not None and speculative.method == "draft_model":
        raise ValueError(
            "--model-impl atom does not support draft models for DeepSeek models, whose KV cache has another layout. "
            "Use mtp (if the checkpoint has layers for it), ngram or suffix, or leave --model-impl out."
        )
    if load_settings().disable_vllm_attention:
        raise ValueError(
            "ATOM_DISABLE_VLLM_ATTENTION=1 is not supported for DeepSeek models: their attention (MLA) runs on our "
            "layer only. Unset it, or leave --model-impl atom out."
        )
    if not model_config.use_mla:
        raise ValueError(refused("VLLM_MLA_DISABLE").message(1, OTHERWISE))


def _check_own_layers(vllm_config: VllmConfig, architecture: str) -> None:
    """Check multi-token prediction (the checkpoint's own layers draft) against the checkpoint and other settings."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None or speculative.method != own_layers.METHOD:
        return
    draft = speculative.draft_model_config
    config = _config_of_own_layers(vllm_config, architecture)
    asked = own_layers.Asked(
        stages=parallel.pipeline_parallel_size,
        ranks=parallel.tensor_parallel_size,
        draft_ranks=speculative.draft_tensor_parallel_size,
        cache_dtype=vllm_config.cache_config.cache_dtype,
        draft_cache_dtype=speculative.kv_cache_dtype,
        load_format=str(vllm_config.load_config.load_format),
        head_quantization=getattr(speculative, "draft_lm_head_quantization", None),  # since 0.33
    )
    for reason in own_layers.refusals(asked):
        raise ValueError(reason)
    load = vllm_config.load_config
    check_files(
        config,
        folder_to_check(str(draft.model), draft.revision, load.download_dir, str(load.load_format)),
        tensor_parallel_size=parallel.tensor_parallel_size,
        quant=quantization_of(draft),
        expert_parallel=parallel.enable_expert_parallel,
        data_parallel_size=parallel.data_parallel_size if config.has_mixtures else 1,
    )


def _config_of_own_layers(vllm_config: VllmConfig, architecture: str) -> CoreConfig:
    """The configuration of the draft layers, which may lie in another folder than the target.

    Raises:
        ValueError: they do not fit the target.
    """
    draft_class, draft = load_draft_class(architecture), vllm_config.speculative_config.draft_model_config
    name, file = str(draft.model), file_values(str(draft.model), draft.revision)
    own_layers.check_architecture(name, file, architecture)
    config = draft_class.from_hf(values_of_draft(vllm_config, architecture))
    own_layers.check_sizes(name, config, read_model_config(values_of(vllm_config.model_config, architecture)))
    return config


def _check_exchange(vllm_config: VllmConfig) -> None:
    """Refuse ways to exchange tokens between data-parallel ranks that are not supported."""
    from atom_plugin.vllm.attention import is_compiled  # a slow import, rarely needed

    backend, size = vllm_config.parallel_config.all2all_backend, vllm_config.parallel_config.data_parallel_size
    if backend not in EXCHANGES:
        otherwise = f"Leave it out with --data-parallel-size {size}."
        raise ValueError(refused("ParallelConfig.all2all_backend").message(backend, otherwise))
    if vllm_config.compilation_config.mode is not None and is_compiled(vllm_config):
        raise ValueError(
            f"--model-impl atom does not support data parallelism (--data-parallel-size {size}) of a mixture that is "
            "compiled (-cc.mode=3, -O1, -O3): the number of tokens that ranks exchange differs from step to step. "
            "Leave the mode out."
        )


def _rewrite(model_config: ModelConfig, architecture: str, **differs: bool) -> None:
    """Serve ``model_config`` by our class of ``architecture``.

    vLLM's model info of our class is that of its own class, except for ``differs``. So vLLM need not inspect our class
    in a new process, which would delay a first start.
    """
    ours = ARCHITECTURE_PREFIX + architecture
    if hasattr(model_config._model_info, "supports_lora"):  # since 0.33
        differs["supports_lora"] = False
    if model_config._model_info.is_hybrid:
        differs["has_inner_state"] = True  # which vLLM's multimodal class does not say
    differs["supports_multimodal"] = False
    model_config.hf_config.architectures = [ours]
    model_config._model_info = replace(model_config._model_info, architecture=ours, **differs)
    model_config._architecture = ours
    logger.info("--model-impl atom: %s is served by %s", architecture, ours)


def _mark_compile_cache(vllm_config: VllmConfig, settings: Settings) -> None:
    """Add what changes our traced code to the key of vLLM's compile cache.

    Otherwise an engine with other kernels would load code that was compiled for the previous ones.
    """
    ours = installed(DISTRIBUTION)
    if isinstance(vllm_config.additional_config, dict):
        kernels = ",".join(f"{op}={name}" for op, name in sorted(settings.kernels.items()))
        attention = "vllm" if settings.disable_vllm_attention else "atom"
        vllm_config.additional_config["atom_plugin"] = {
            "version": "" if ours is None else ours.version,
            "kernels": kernels,
            "attention": attention,
        }


def _route_draft(vllm_config: VllmConfig, target: str, settings: Settings) -> None:
    """Route a draft that we support to our class. Any other stays vLLM's own model, and the log says so."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or _is_ours(draft):
        return
    if speculative.method == own_layers.METHOD:
        _refuse_by(DRAFT, vllm_config, settings)
        _serve_text_only(draft)
        _rewrite(draft, DRAFTS[target][1], supports_pp=False)
        return
    if speculative.method != "draft_model":
        return
    names = list(draft.model_arch_config.architectures or [])
    if reason := _why_not_ours(draft, names):
        logger.info("--model-impl atom: the draft model %s is vLLM's own. %s", ", ".join(names), reason)
    else:
        _refuse_by(DRAFT, vllm_config, settings)
        _rewrite(draft, names[0])
    # Model runner V1 (goes with vLLM 0.32's support) gives a draft the block table of the first cache group. Draft
    # layers with other windows than the target's would be in another group, and overwrite the target's cache.
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True


def _why_not_ours(draft: ModelConfig, names: list[str]) -> str | None:
    if not names or names[0] not in MODELS:
        return unsupported_architecture(", ".join(names))
    try:
        quantization_of(draft)
    except ValueError as error:
        return str(error)
    return None
