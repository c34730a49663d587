"""SGLang's configuration and parallel groups as the core's Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.runtime_context import get_model, get_parallel

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_core.runtime import AttentionFactory, PipelineStage, Runtime
from atom_plugin.common.settings import Settings

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


class GroupCommunicator:
    """The core's Communicator over one of SGLang's groups."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.rank: int = group.rank_in_group
        self.world_size: int = group.world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        return x if self.world_size == 1 else self.group.all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        return x if self.world_size == 1 else self.group.all_gather(x, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        if self.world_size == 1:
            return x
        parts = x.movedim(dim, 0).contiguous()
        result = parts.new_empty(parts.shape[0] // self.world_size, *parts.shape[1:])
        torch.distributed.reduce_scatter_tensor(result, parts, group=self.group.device_group)
        return result.movedim(0, dim)

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        result = x.new_empty(sum(receive), *x.shape[1:])
        torch.distributed.all_to_all_single(result, x, receive, send, group=self.group.device_group)
        return result


def build_runtime(max_model_len: int, num_layers: int, attention: AttentionFactory, settings: Settings) -> Runtime:
    """The runtime of the model that SGLang is about to build, on the device and in the dtype that it has set.

    Args:
        max_model_len: the longest sequence that will be served.
        num_layers: the model's decoder layers, to be split over pipeline stages.
        attention: makes its attention layers.
        settings: the ``ATOM_*`` variables.

    Raises:
        ValueError: ``ATOM_KERNELS`` names something that does not exist.
    """
    device, dtype = torch.empty(0).device, torch.get_default_dtype()
    parallel = get_parallel()
    first, end = get_pp_indices(num_layers, parallel.pp_group.rank_in_group, parallel.pp_group.world_size)
    return Runtime(
        device=device,
        dtype=dtype,
        kernels=kernel_set(Target.of(device), settings.kernels),
        attention=attention,
        max_model_len=max_model_len,
        cache_dtype=_cache_dtype(dtype),
        tensor_parallel=GroupCommunicator(parallel.tp_group),
        pipeline=PipelineStage(first, end),
    )


def _cache_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the pool, which SGLang makes later and by the same function."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return dtype
