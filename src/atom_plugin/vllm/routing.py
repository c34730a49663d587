"""``--model-impl atom``: from a stock architecture to our class, or one clear reason why not.

Three fields of vLLM's ModelConfig are rewritten, the kind of update that vLLM makes itself for drafts:
``hf_config.architectures``, ``_model_info`` and ``_architecture``. Everything refused here is refused while the
configuration is made: before any weight is loaded, in the process that the user started. What is refused by its value
alone stands in the table of :mod:`atom_plugin.vllm.flags`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
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
from atom_plugin.common.flags import Refused
from atom_plugin.common.hub import SHARDED_STATE, folder_to_check
from atom_plugin.common.settings import PREFIX, Settings, load_settings
from atom_plugin.common.versions import DISTRIBUTION, installed
from atom_plugin.vllm import ARCHITECTURE_PREFIX
from atom_plugin.vllm.checkpoint_config import values_of, values_of_draft
from atom_plugin.vllm.flags import DRAFT, EXCHANGES, OTHERWISE, OWNERS, looked_up, refused
from atom_plugin.vllm.quantization import quantization_of
from atom_plugin.vllm.routed_experts import returns_routed_experts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.atom_plugin")

#: vLLM's own default on a CPU (``CpuPlatform.update_block_size_for_backend``).
_CPU_BLOCK_SIZE = 128
#: By layers of the checkpoint itself: multi-token prediction.
_OWN_LAYERS = "mtp"


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse what our models cannot do, while all values are the user's own and no default is filled in.

    Raises:
        ValueError: something asked for that our models cannot do; the message says what, and what is supported.
    """
    if _is_ours(vllm_config.model_config):
        return
    settings = load_settings()  # a bad ATOM_ variable is refused here, where the user sees it
    _refuse_platform()
    _supported_architecture(vllm_config.model_config)
    _refuse_by(looked_up(), vllm_config, settings)


def route(vllm_config: VllmConfig) -> None:
    """Send the model of ``vllm_config``, and its draft where we have one, to our classes. Safe to call again.

    Raises:
        ValueError: what :func:`refuse` has let through does not fit the checkpoint, or other settings.
    """
    model_config = vllm_config.model_config
    if _is_ours(model_config):
        return
    settings = load_settings()
    architecture = _supported_architecture(model_config)
    if vllm_config.load_config.load_format in ("auto", "hf"):
        # vLLM would fall back to *.bin pickles where a repository has no safetensors.
        vllm_config.load_config.load_format = "safetensors"
    _take_cache_dtype_of_checkpoint(vllm_config)
    _set_cpu_block_size(vllm_config)
    _check_checkpoint(vllm_config, architecture)
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
    """The value of a setting of the table as the user gave it; None where it is unset, or this vLLM does not have it.

    A member of an enumeration is its name, and a whole configuration True.
    """
    owner, _, name = setting.rpartition(".")
    if not owner:
        return _variable(name)
    place = reduce(lambda it, part: getattr(it, part, None), filter(None, OWNERS[owner].split(".")), vllm_config)
    value = getattr(place, name, None)
    if setting == "ModelConfig.runner":  # "auto" goes by the architecture, and by --convert
        return vllm_config.model_config.runner_type
    if setting == "CacheConfig.block_size" and not getattr(place, "user_specified_block_size", False):
        return None
    if setting == "SpeculativeConfig.draft_load_config":
        return None if value is None else value.load_format
    if isinstance(value, Enum):
        return value.name
    return True if is_dataclass(value) else value


def _variable(name: str) -> Any:
    from vllm import envs
    from vllm.platforms import current_platform

    if name.startswith("VLLM_ROCM_") and not current_platform.is_rocm():
        return None  # read by no model there
    return getattr(envs, name) if name in envs.environment_variables and envs.is_set(name) else None


def _take_cache_dtype_of_checkpoint(vllm_config: VllmConfig) -> None:
    """Have an FP8 cache where a compressed-tensors checkpoint says so and the user nothing.

    vLLM does it while it builds an attention layer of its own; other checkpoints that say so it has read by now.
    """
    scheme, cache = getattr(vllm_config.quant_config, "kv_cache_scheme", None), vllm_config.cache_config
    if not scheme or cache.cache_dtype != "auto":
        return
    found = {name: scheme.get(name) for name in ("type", "num_bits", "strategy", "symmetric")}
    if found != {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}:
        raise ValueError(
            f"The checkpoint's kv_cache_scheme is {found}; --model-impl atom supports symmetric 8-bit floating point "
            "with one scale a tensor. Name a --kv-cache-dtype to leave it aside."
        )
    cache.cache_dtype = "fp8"


def _set_cpu_block_size(vllm_config: VllmConfig) -> None:
    """Have pages of the tokens that vLLM prefers on a CPU, where the user named no ``--block-size``.

    Our layers choose their kernels while the model is built, and vLLM's CPU kernels take pages of 32 tokens and more.
    Since 0.33 vLLM sets the size once the model is built; until then it is 16.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if current_platform.is_cpu() and not vllm_config.model_config.use_mla and not cache.user_specified_block_size:
        cache.block_size = _CPU_BLOCK_SIZE


def _check_checkpoint(vllm_config: VllmConfig, architecture: str) -> None:
    """Compare a local checkpoint's headers with our model and its quantisation, before anything is loaded.

    Of a model that is still to be fetched from a hub, only the files' names are looked at; loading compares the rest.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    quant = quantization_of(model_config)
    config = read_model_config(values_of(model_config, architecture))
    if config.has_mla:
        _check_latents(vllm_config)
    load = vllm_config.load_config
    _check_routed_experts(vllm_config, config)
    replicas = parallel.data_parallel_size if config.has_mixtures else 1
    if replicas > 1:
        _check_exchange(vllm_config)
    check_files(
        config,
        folder_to_check(str(model_config.model), model_config.revision, load.download_dir, str(load.load_format)),
        tensor_parallel_size=parallel.tensor_parallel_size,
        quant=quant,
        expert_parallel=parallel.enable_expert_parallel,
        data_parallel_size=replicas,
    )
    if model_config.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"--dtype {model_config.dtype} is not supported; supported: bfloat16, float16, float32.")
    if model_config.head_dtype not in (model_config.dtype, torch.float32):
        raise ValueError(
            f"head_dtype {_name(model_config.head_dtype)} (--hf-overrides) with --dtype {_name(model_config.dtype)} is "
            f"not supported by --model-impl atom; supported: float32, {_name(model_config.dtype)}."
        )


def _check_routed_experts(vllm_config: VllmConfig, config: CoreConfig) -> None:
    """Whether vLLM can be told which experts tokens are sent to, where it asks."""
    if not returns_routed_experts(vllm_config):
        return
    from atom_plugin.vllm.attention import is_compiled  # imports much, and is asked for by few

    if not config.has_mixtures:
        raise ValueError(
            f"--enable-return-routed-experts is for mixtures of experts, and {config.architecture} is none here. Leave "
            "it out."
        )
    if vllm_config.compilation_config.mode is not None and is_compiled(vllm_config):
        raise ValueError(
            "--model-impl atom does not support --enable-return-routed-experts with a model that is compiled "
            "(-cc.mode=3, -O1, -O3): what is compiled cannot hand them on. Leave the mode out."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_latents(vllm_config: VllmConfig) -> None:
    """Attention over latents is ours alone, and its cache is one of latents, for the target and a draft."""
    model_config, speculative = vllm_config.model_config, vllm_config.speculative_config
    if speculative is not None and speculative.method == "draft_model":
        raise ValueError(
            "--model-impl atom does not support draft models for DeepSeek models, whose cache is of another kind than "
            "theirs; speculate by mtp (where the checkpoint has layers for it), ngram or suffix, or leave --model-impl "
            "out."
        )
    if load_settings().disable_vllm_attention:
        raise ValueError(
            "ATOM_DISABLE_VLLM_ATTENTION=1 is not supported for DeepSeek models: their attention over latents runs on "
            "our layer alone. Unset it, or leave --model-impl atom out."
        )
    if not model_config.use_mla:
        raise ValueError(refused("VLLM_MLA_DISABLE").message(1, OTHERWISE))


def _check_own_layers(vllm_config: VllmConfig, architecture: str) -> None:
    """Whether the checkpoint can draft by layers of its own as the user says."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None or speculative.method != _OWN_LAYERS:
        return
    draft = speculative.draft_model_config
    draft_class = load_draft_class(architecture)
    config = draft_class.from_hf(values_of_draft(vllm_config, architecture))
    draft_ranks, ranks = speculative.draft_tensor_parallel_size, parallel.tensor_parallel_size
    cache_dtype = speculative.kv_cache_dtype
    head_quantization = getattr(speculative, "draft_lm_head_quantization", None)  # since 0.33
    for differs, what in (
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: the stage that drafts lacks the embedding",
        ),
        (
            draft_ranks not in (None, ranks),
            f"draft_tensor_parallel_size={draft_ranks} beside --tensor-parallel-size {ranks}: the embedding and the "
            "head are the target's",
        ),
        (
            cache_dtype not in (None, vllm_config.cache_config.cache_dtype),
            f"kv_cache_dtype={cache_dtype} of its own; the cache is of the target's dtype",
        ),
        (
            vllm_config.load_config.load_format == SHARDED_STATE,
            f"--load-format {SHARDED_STATE}, whose files have no layers that draft",
        ),
        (
            head_quantization is not None,
            f"draft_lm_head_quantization={head_quantization}; drafts are read off the target's own head",
        ),
    ):
        if differs:
            raise ValueError(
                f"--model-impl atom does not support multi-token prediction (method {_OWN_LAYERS!r}) with {what}. "
                "Leave one of them out."
            )
    load = vllm_config.load_config
    check_files(
        config,
        folder_to_check(str(draft.model), draft.revision, load.download_dir, str(load.load_format)),
        tensor_parallel_size=ranks,
        quant=quantization_of(draft),
        expert_parallel=parallel.enable_expert_parallel,
        data_parallel_size=parallel.data_parallel_size if config.has_mixtures else 1,
    )


def _check_exchange(vllm_config: VllmConfig) -> None:
    """Whether data-parallel ranks of a mixture can exchange tokens as the user says."""
    from atom_plugin.vllm.attention import is_compiled  # imports much, and is asked for by few

    backend, size = vllm_config.parallel_config.all2all_backend, vllm_config.parallel_config.data_parallel_size
    if backend not in EXCHANGES:
        otherwise = f"Leave it out with --data-parallel-size {size}."
        raise ValueError(refused("ParallelConfig.all2all_backend").message(backend, otherwise))
    if vllm_config.compilation_config.mode is not None and is_compiled(vllm_config):
        raise ValueError(
            f"--model-impl atom does not support data parallelism (--data-parallel-size {size}) of a mixture that is "
            "compiled (-cc.mode=3, -O1, -O3): how many tokens ranks exchange is known at each step alone. Leave the "
            "mode out."
        )


def _rewrite(model_config: ModelConfig, architecture: str, **differs: bool) -> None:
    """Serve ``model_config`` by our class of ``architecture``.

    What vLLM wants to know of a class is the same of ours as of its own, but for what ``differs``. It would find out by
    a process that imports all of vLLM anew, and a first start would wait for that.
    """
    ours = ARCHITECTURE_PREFIX + architecture
    if hasattr(model_config._model_info, "supports_lora"):  # since 0.33
        differs["supports_lora"] = False
    model_config.hf_config.architectures = [ours]
    model_config._model_info = replace(model_config._model_info, architecture=ours, **differs)
    model_config._architecture = ours
    logger.info("--model-impl atom: %s is served by %s", architecture, ours)


def _mark_compile_cache(vllm_config: VllmConfig, settings: Settings) -> None:
    """Put what changes our traced code into the part of the configuration that vLLM's compile cache is keyed by.

    Without it, an engine with other kernels would load code compiled for the ones before.
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
    """A draft of a supported kind runs on our class too; any other stays vLLM's own, and we say so."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or _is_ours(draft):
        return
    if speculative.method == _OWN_LAYERS:
        _refuse_by(DRAFT, vllm_config, settings)
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
    # Model runner V1 (goes with vLLM 0.32's support): it gives a draft the block table of the first cache group,
    # whichever group the draft's layers are in. Layers with other windows than the target's would be a group of their
    # own and overwrite the target's cache.
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True


def _why_not_ours(draft: ModelConfig, names: list[str]) -> str | None:
    if not names or names[0] not in MODELS:
        return unsupported_architecture(", ".join(names))
    try:
        quantization_of(draft)
    except ValueError as error:
        return str(error)
    return None
