"""Loading weights from vLLM, at the start and while serving.

``reload_weights`` and weight transfers use layer-wise reloading: vLLM replaces every tensor of the model's modules with
one on the meta device, collects what each layer's ``weight_loader`` gets into a second copy, and copies that over the
original. Our models are written in place. So the original tensors are restored when the first new one arrives, and
vLLM has nothing left to copy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from atom_core.loading import check_update, weights_of
from atom_core.runtime import Runtime
from atom_core.weights import unread_layers
from atom_plugin.common.hub import cached_folder, patterns, whole_folder
from atom_plugin.common.shards import PATTERN, check_shards
from atom_plugin.common.wrapped_model import WrappedModel

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = logging.getLogger("vllm.atom_plugin")

#: The name in errors of tensors that come from no folder.
UPDATE = "an update"


class EndOfLoading(nn.Module, AttentionLayerBase):
    """A module that learns from vLLM that all weights are loaded, at the start and after each update.

    vLLM calls this hook only on attention layers, after all other modules are done. This one has no KV cache, and vLLM
    makes none for it.
    """

    def __init__(self, model: AtomModel) -> None:
        super().__init__()
        self._model = (model,)  # a tuple, so that torch does not register the parent as a child

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Never called."""
        raise AssertionError("EndOfLoading is not an attention layer")

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """None: it has no cache."""
        return None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See vLLM."""
        self._model[0].end_update()


def check_files_of_rank(model: WrappedModel, directory: Path, load_config: LoadConfig) -> None:
    """Check the files of ``directory`` that vLLM's ``sharded_state`` loader will read; see :func:`check_shards`."""
    stages, rank = get_pp_group(), get_tp_group().rank_in_group
    pattern = (load_config.model_loader_extra_config or {}).get("pattern")
    if pattern is None:
        # Since 0.32 file names have the pipeline stage too, if there are several.
        pattern = getattr(ShardedStateLoader, "PP_AND_TP_PATTERN", PATTERN) if stages.world_size > 1 else PATTERN
    check_shards(model, directory, pattern.format(rank=rank, tp_rank=rank, pp_rank=stages.rank_in_group, part="*"))


class AtomModel(WrappedModel):
    """The base of our model classes in vLLM: loads and updates their weights."""

    runtime: Runtime
    #: The folder, or name on a hub, that the model was built for.
    checkpoint: str

    def set_up_weights(self, model_config: ModelConfig, cache: str | None) -> None:
        """Called once, after the core is built.

        Args:
            model_config: vLLM's; its ``model`` is the folder that weights are loaded from, or a name on a hub.
            cache: the download folder for a name on a hub; None: Hugging Face's cache.
        """
        self.weights = weights_of(self.core, self.runtime)
        self._model_config, self._cache = model_config, cache
        self._built_for = (str(model_config.model), model_config.revision)
        self._from = (model_config.model, model_config.revision)
        self.end_of_loading = EndOfLoading(self)

    @property
    def allow_patterns_overrides(self) -> list[str] | None:
        """The weight files that vLLM may read: the same that our check of headers reads."""
        return patterns(str(self._model_config.model), self._model_config.revision, self._cache)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all weights the first time. Later calls update all of them if vLLM reads a folder, else any of them.

        Raises:
            ValueError: tensors do not fit the model; the message lists all of them.
        """
        if not self.weights.loaded:
            source = str(self._model_config.model)
            names = self.weights.load(weights, source)
            if get_tp_group().rank_in_group == 0 and (line := unread_layers(self.core, source)):
                logger.info(line)
            return names
        if self._restore_tensors():
            self.weights.begin()
        # `reload_weights` without an iterator passes the generator of this method of vLLM's loader.
        of_folder = getattr(weights, "__name__", "") == "get_all_weights"
        try:
            names = (
                self._update_from_folder(weights) if of_folder else self.weights.update(weights, UPDATE, whole=False)
            )
        except Exception as error:
            # vLLM does not cancel a failed update. The original tensors are restored by now.
            for module in self.modules():
                get_layerwise_info(module).reset()
            self.weights.end()
            self._model_config.model, self._model_config.revision = self._from
            if of_folder and (get_tp_group().rank_in_group or get_pp_group().rank_in_group):
                # All ranks raise the same error. vLLM reads only the first rank's, and would take an error of another
                # rank for the result of its next call.
                logger.warning("%s", error)
                return {name for name, _ in self.named_parameters()}
            raise
        self._from = (self._model_config.model, self._model_config.revision)
        self.weights_written()
        return names

    def _update_from_folder(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        source = str(self._model_config.model)
        folder = whole_folder(source, self._model_config.revision, self._cache)
        if folder is not None:
            check_update(self.weights, self.core.config, folder, self.runtime.quant, self._served())
        return self.weights.update(weights, source, whole=True, checked=folder is not None)

    def _served(self) -> Path | None:
        """The folder whose config the model was built from; None for a draft, which reads that config differently."""
        return None if self.core.borrowed else cached_folder(*self._built_for, self._cache)

    def _restore_tensors(self) -> bool:
        """Restore the tensors that layer-wise reloading has replaced; whether there were any.

        vLLM's reloading state is reset, except for :class:`EndOfLoading`, which learns when the update has ended.
        """
        taken = False
        for module in self.modules():
            info = get_layerwise_info(module)
            if info.kernel_tensors is None:
                continue
            parameters, buffers = info.kernel_tensors
            for name, parameter in parameters.items():
                taken |= module._parameters.get(name) is not parameter
                module.register_parameter(name, parameter)
            for name, buffer in buffers.items():
                module._buffers.pop(name, None)
                module.register_buffer(name, buffer, persistent=name not in info.kernel_non_persistent_buffers)
            if module is not self.end_of_loading:
                info.reset()
        return taken

    def end_update(self) -> None:
        """All tensors of the first load, or of an update, have arrived."""
        self.weights.end()
        if self.weights.loaded:
            self.weights_written()

    def weights_written(self) -> None:
        """Called after an update. vLLM's layers may have copies of old weights, or have lost theirs."""
