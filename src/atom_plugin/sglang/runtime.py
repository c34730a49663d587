"""SGLang's configuration and parallel groups as the core's Runtime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.runtime_context import get_exec, get_model, get_observability, get_parallel, get_server_args

from atom_core.kernels.select import Target
from atom_core.runtime import Binder, PipelineStage, RoutedExperts, Runtime, SingleDataParallelRank
from atom_plugin.common.communicator import GroupCommunicator
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import Settings
from atom_plugin.sglang.checkpoint_config import FLOAT32_HEAD
from atom_plugin.sglang.data_parallel import SglangDataParallelGroup
from atom_plugin.sglang.gpu_kernels import gpu_kernels
from atom_plugin.sglang.kernels import unfit_pages
from atom_plugin.sglang.quantization import quantization_of


def build_runtime(
    config: Any,
    quant_config: Any,
    num_layers: int,
    bind: Binder,
    settings: Settings,
    routed_experts: RoutedExperts | None = None,
) -> Runtime:
    """The runtime of the model that SGLang is about to build, on the device and in the dtype that it has set.

    Args:
        config: of the model, as SGLang has completed it.
        quant_config: SGLang's own object for the model's quantisation, or None.
        num_layers: the model's decoder layers, which are split over pipeline stages.
        bind: binds its token mixers to SGLang's pools.
        settings: the ``ATOM_*`` variables.
        routed_experts: see :class:`Runtime`.

    Raises:
        ValueError: ``ATOM_KERNELS`` names something that does not exist, or our models cannot run the quantisation.
    """
    device, dtype = torch.empty(0).device, torch.get_default_dtype()
    parallel = get_parallel()
    first, end = get_pp_indices(num_layers, parallel.pp_group.rank_in_group, parallel.pp_group.world_size)
    # The whole tensor-parallel group, unless attention is data-parallel.
    group, has_dp = parallel.attn_tp_group, parallel.attn_dp_size > 1
    states = mamba2_state_dtype(config)
    return Runtime(
        device=device,
        dtype=dtype,
        kernels=chosen_kernels(
            Target.of(device), settings, gpu_kernels(group), unfit_pages(get_server_args().page_size or 1)
        ),
        bind=bind,
        max_model_len=int(config.context_len),
        cache_dtype=_cache_dtype(dtype, quant_config),
        state_dtype=states.temporal,
        conv_state_dtype=states.conv,
        tensor_parallel=GroupCommunicator(group, reads_peers=not get_exec().comm.disable_custom_all_reduce),
        data_parallel=SglangDataParallelGroup(parallel.tp_group, group.world_size)
        if has_dp
        else SingleDataParallelRank(),
        expert_parallel=parallel.moe_ep_size > 1,
        pipeline=PipelineStage(first, end),
        quant=quantization_of(config, None if quant_config is None else quant_config.get_name()),
        # The radix tree shares what a batch writes only with later batches.
        same_step_reads="never",
        fuse_modules=not uses_module_hooks(),
        routed_experts=routed_experts,
        head_dtype=torch.float32
        if get_exec().features.enable_fp32_lm_head or getattr(config, FLOAT32_HEAD, False)
        else None,
    )


def uses_module_hooks() -> bool:
    """Whether SGLang puts hooks on modules, which must then all be called (``--forward-hooks``, tensor dumps)."""
    asked = get_observability()
    return bool(asked.forward_hooks) or asked.debug_tensor_dump_output_folder is not None


def _cache_dtype(model_dtype: torch.dtype, quant_config: Any) -> torch.dtype:
    """The dtype of the KV pool, by the function with which SGLang sets it later."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=SimpleNamespace(quant_config=quant_config),
        model_dtype=model_dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return dtype
