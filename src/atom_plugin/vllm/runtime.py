"""vLLM's configuration and parallel groups as the core's Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_dp_group, get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from atom_core.kernels.select import Target
from atom_core.mixers.base import BaseAttention, TokenMixer
from atom_core.mixers.gated_delta_net import GatedDeltaNetMixer
from atom_core.runtime import Binder, PipelineStage, RoutedExperts, Runtime, SingleDataParallelRank
from atom_core.types import SameStepReads
from atom_plugin.common.communicator import GroupCommunicator
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import Settings
from atom_plugin.vllm.all_reduce import aiter_all_reduce_norm
from atom_plugin.vllm.attention import VllmLinearAttention, is_compiled
from atom_plugin.vllm.cpu_kernels import cpu_kernels
from atom_plugin.vllm.data_parallel import VllmDataParallelGroup
from atom_plugin.vllm.gpu_kernels import gpu_kernels
from atom_plugin.vllm.quantization import quantization_of
from atom_plugin.vllm.states import state_dtypes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator


class VllmCommunicator(GroupCommunicator):
    """Over one of vLLM's groups; vLLM's reduce-scatter is a custom op and works in captured graphs."""

    group: GroupCoordinator

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        return x if self.world_size == 1 else self.group.reduce_scatter(x, dim)


#: Kernels that are left out of compiled models, and why.
COMPILED = {
    (op, "triton"): "torch.compile fuses the torch ops here."
    for op in ("embedding", "rms_norm", "linear", "gated_activation")
} | {("all_reduce_norm", "aiter"): "vLLM's own compiler pass fuses all-reduce and norm here."}


def cache_dtype(name: str, model_config: ModelConfig) -> torch.dtype:
    """The dtype of the cache's elements for a value of ``--kv-cache-dtype``; vLLM's function returns uint8 for FP8."""
    if name in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform

        return current_platform.fp8_dtype()
    return torch.float8_e5m2 if name == "fp8_e5m2" else kv_cache_dtype_str_to_dtype(name, model_config)


def same_step_reads(vllm_config: VllmConfig) -> SameStepReads:
    """Whether a request may read a page that another fills in the same step, which prefix caching allows.

    vLLM shares a page as soon as its last token is scheduled. After that page a KV connector may load further tokens of
    the request, which then starts within a page.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return "never"
    return "at page starts" if vllm_config.kv_transfer_config is None else "anywhere"


def build_runtime(
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    num_layers: int,
    bind: Binder,
    settings: Settings,
    routed_experts: RoutedExperts | None = None,
) -> Runtime:
    """The runtime of one model on this rank.

    Args:
        vllm_config: the engine's configuration.
        model_config: of the model to build, the target or a draft.
        num_layers: the model's decoder layers, which are split over pipeline stages.
        bind: binds its token mixers over pages to vLLM's caches; those over states are bound to ours.
        settings: the ``ATOM_*`` variables.
        routed_experts: see :class:`Runtime`.

    Raises:
        ValueError: ``ATOM_KERNELS`` names something that does not exist, or our models cannot run the quantisation.
    """
    device = torch.device(vllm_config.device_config.device)
    target = Target.of(device)
    contributed = dict(cpu_kernels(vllm_config) if target.kind == "cpu" else gpu_kernels())
    contributed["all_reduce_norm"] = aiter_all_reduce_norm()
    excluded = COMPILED if is_compiled(vllm_config) else {}
    pp, has_dp = get_pp_group(), vllm_config.parallel_config.data_parallel_size > 1
    conv_state_dtype, state_dtype = state_dtypes(vllm_config)

    def bind_mixer(mixer: TokenMixer, runtime: Runtime) -> BaseAttention:
        return (VllmLinearAttention if isinstance(mixer, GatedDeltaNetMixer) else bind)(mixer, runtime)

    first, end = get_pp_indices(num_layers, pp.rank_in_group, pp.world_size)
    return Runtime(
        device=device,
        dtype=model_config.dtype,
        kernels=chosen_kernels(target, settings, contributed, excluded),
        bind=bind_mixer,
        max_model_len=num_positions(vllm_config, model_config),
        cache_dtype=cache_dtype(vllm_config.cache_config.cache_dtype, model_config),
        conv_state_dtype=conv_state_dtype,
        state_dtype=state_dtype,
        tensor_parallel=VllmCommunicator(
            get_tp_group(), reads_peers=not vllm_config.parallel_config.disable_custom_all_reduce
        ),
        data_parallel=VllmDataParallelGroup(get_dp_group()) if has_dp else SingleDataParallelRank(),
        expert_parallel=vllm_config.parallel_config.enable_expert_parallel,
        pipeline=PipelineStage(first, end),
        quant=quantization_of(model_config),
        same_step_reads=same_step_reads(vllm_config),
        head_dtype=model_config.head_dtype,
        routed_experts=routed_experts,
    )


def num_positions(vllm_config: VllmConfig, model_config: ModelConfig) -> int:
    """How many positions a model is asked for: a draft is asked for its target's, even where it has fewer by itself."""
    speculation = vllm_config.speculative_config
    target = model_config if speculation is None else speculation.target_model_config
    return int(max(model_config.max_model_len, target.max_model_len))
