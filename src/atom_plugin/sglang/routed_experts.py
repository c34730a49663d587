"""Reports the experts of each token to SGLang, as SGLang's own mixtures do.

``--enable-return-routed-experts`` stores them for each token of the pool, and ``--expert-distribution-recorder-mode``
counts them while recording. Both write to buffers on the device, within captured graphs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.model_executor.forward_context import get_forward_context, has_forward_context
from sglang.srt.runtime_context import get_exec, get_flags
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils import common

from atom_core.config import ModelConfig
from atom_core.models.read_config import read_model_config
from atom_core.runtime import RoutedExperts
from atom_plugin.sglang.checkpoint_config import values_of

#: The number of experts of a token that ``per_token`` records (``_DetailSinglePassGatherer``).
MOST_PER_TOKEN = 8
#: Modes in which SGLang counts tokens by expert.
_COUNTED = ("stat", "per_pass")


def routed_experts() -> RoutedExperts | None:
    """The callback of the model that SGLang is about to build; None if no flag asks, or the model is a draft."""
    if get_flags().moe.in_speculative_scope:
        return None
    consumers: list[RoutedExperts] = []
    if get_exec().features.enable_return_routed_experts:
        consumers.append(_capture)
    if get_exec().moe.expert_distribution_recorder_mode is not None:
        consumers.append(_count)
    if not consumers:
        return None

    def report(index: int, experts: torch.Tensor) -> None:
        for consume in consumers:
            consume(index, experts)

    return report


def _capture(index: int, experts: torch.Tensor) -> None:
    capturer = get_global_experts_capturer()
    if capturer is not None:  # None before SGLang has a pool
        capturer.capture(layer_id=index, topk_indices=experts)


def _count(index: int, experts: torch.Tensor) -> None:
    recorder = get_global_expert_distribution_recorder()
    if not (recorder.recording or experts.is_cuda):  # the recorder would ask a GPU whether a graph is captured
        return
    with recorder.with_current_layer(index):
        recorder.on_select_experts(topk_ids=_mask_padding(experts))


def _mask_padding(experts: torch.Tensor) -> torch.Tensor:
    """``experts [T, k]`` with -1 in padding rows, if SGLang says how many rows are not padding."""
    bound: Callable[[], torch.Tensor | None] | None = (
        get_forward_context().moe_num_token_non_padded if has_forward_context() else None
    )
    count = None if bound is None else bound()
    if count is None:
        return experts
    rows = torch.arange(len(experts), device=experts.device)
    return experts.masked_fill((rows >= count)[:, None], -1)


def expert_location(hf_config: Any) -> ModelConfigForExpertLocation | None:
    """The sizes by which SGLang counts experts; None if it does not. Experts stay on their ranks in both cases."""
    if get_exec().moe.expert_distribution_recorder_mode is None:
        return None
    config = read_model_config(values_of(hf_config))
    count = next((layer.moe.routing.num_experts for layer in config.layers if layer.moe is not None), None)
    return None if count is None else ModelConfigForExpertLocation(config.num_layers, count)


def check_routed_experts(view: Any, config: ModelConfig) -> None:
    """Refuse flags for routed experts that a model of ``config`` cannot serve.

    Args:
        view: SGLang's resolving view of the server's arguments.
        config: of the model.

    Raises:
        ValueError: the model has no mixtures, or the flag's mode is not supported.
    """
    mode = view.expert_distribution_recorder_mode
    flags = []
    if view.enable_return_routed_experts:
        flags.append("--enable-return-routed-experts")
    if mode is not None:
        flags.append(f"--expert-distribution-recorder-mode {mode}")
    if flags and not config.has_mixtures:
        raise ValueError(
            f"{flags[0]} is for mixtures of experts, and this {config.architecture} is not one. Leave it out."
        )
    if view.enable_return_routed_experts and view.pp_size > 1:
        raise ValueError(
            f"--enable-return-routed-experts is not supported with --pp-size {view.pp_size}: a stage knows only the "
            "experts of its own layers. Leave one of them out."
        )
    if mode == "stat_approx":
        raise ValueError(
            "--expert-distribution-recorder-mode stat_approx counts what --moe-a2a-backend deepep sends, which "
            "atom-plugin does not support; use stat."
        )
    if mode in _COUNTED and not _has_accelerator():
        raise ValueError(
            f"--expert-distribution-recorder-mode {mode} is not supported on --device {view.device}: SGLang counts "
            "experts only on an accelerator. Use per_token."
        )
    top_k = max((layer.moe.routing.top_k for layer in config.layers if layer.moe is not None), default=0)
    if mode == "per_token" and top_k > MOST_PER_TOKEN:
        raise ValueError(
            f"--expert-distribution-recorder-mode per_token records {MOST_PER_TOKEN} experts a token, and this "
            f"{config.architecture} has {top_k} (num_experts_per_tok); use stat or per_pass."
        )


def _has_accelerator() -> bool:
    """Whether SGLang finds a device to count on (``_LayerBasedGpuSinglePassGatherer``)."""
    try:
        common.get_device()
    except RuntimeError:
        return False
    return True
