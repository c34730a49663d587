"""How vLLM's calls that change weights reach a model of ours.

``reload_weights`` and weight transfers first take every tensor out of the model's modules and put tensors without
memory in their places (layer-wise reloading); what a layer's ``weight_loader`` was given is made into a second copy of
it, which is copied over the first. Ours are written to where they are, so they are put back when the first tensor
comes, and vLLM finds that it has nothing to copy.
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

#: What errors call tensors that come from no folder.
UPDATE = "an update"


class EndOfLoading(nn.Module, AttentionLayerBase):
    """Told by vLLM that weights are loaded, the first time and each time again.

    Among a model's modules vLLM tells attention layers alone, when all others are done. This one has no cache, and is
    not among the layers for which vLLM makes one.
    """

    def __init__(self, model: AtomModel) -> None:
        super().__init__()
        self._model = (model,)  # referred to, for it is the module around this one

    def get_attn_backend(self) -> type[AttentionBackend]:
        """It attends to nothing."""
        raise AssertionError("it is no layer of the model")

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """It has no cache."""
        return None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See vLLM."""
        self._model[0].end_update()


def check_files_of_rank(model: WrappedModel, directory: Path, load_config: LoadConfig) -> None:
    """What vLLM's loader of ``sharded_state`` will read of ``directory``; see :func:`check_shards`."""
    stages, rank = get_pp_group(), get_tp_group().rank_in_group
    pattern = (load_config.model_loader_extra_config or {}).get("pattern")
    if pattern is None:
        # Since 0.32 files are called by their pipeline stage too, where there are several.
        pattern = getattr(ShardedStateLoader, "PP_AND_TP_PATTERN", PATTERN) if stages.world_size > 1 else PATTERN
    check_shards(model, directory, pattern.format(rank=rank, tp_rank=rank, pp_rank=stages.rank_in_group, part="*"))


class AtomModel(WrappedModel):
    """A model behind vLLM's interface, as far as its weights go."""

    runtime: Runtime
    #: The folder that it was built for.
    checkpoint: str

    def set_up_weights(self, model_config: ModelConfig, cache: str | None) -> None:
        """Called once the core is built.

        Args:
            model_config: vLLM's, whose ``model`` is the folder that weights are loaded from, or a name on a hub.
            cache: where such a name's files are downloaded to; None: Hugging Face's cache.
        """
        self.weights = weights_of(self.core, self.runtime)
        self._model_config, self._cache = model_config, cache
        self._built_for = (str(model_config.model), model_config.revision)
        self._from = (model_config.model, model_config.revision)
        self.end_of_loading = EndOfLoading(self)

    @property
    def allow_patterns_overrides(self) -> list[str] | None:
        """Where vLLM looks for it: the files that our check of headers reads, and none beside them."""
        return patterns(str(self._model_config.model), self._model_config.revision, self._cache)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The first weights are whole; later ones are whole where a loader of vLLM's reads a folder, else any.

        Raises:
            ValueError: what does not fit, all of it.
        """
        if not self.weights.loaded:
            source = str(self._model_config.model)
            names = self.weights.load(weights, source)
            if get_tp_group().rank_in_group == 0 and (line := unread_layers(self.core, source)):
                logger.info(line)
            return names
        if self._restore_tensors():
            self.weights.begin()
        # vLLM's `reload_weights` without an iterator hands over what this method of its loader gives.
        of_folder = getattr(weights, "__name__", "") == "get_all_weights"
        try:
            names = (
                self._update_from_folder(weights) if of_folder else self.weights.update(weights, UPDATE, whole=False)
            )
        except Exception as error:
            # vLLM calls no update off; the tensors that it has taken are in their places.
            for module in self.modules():
                get_layerwise_info(module).reset()
            self.weights.end()
            self._model_config.model, self._model_config.revision = self._from
            if of_folder and (get_tp_group().rank_in_group or get_pp_group().rank_in_group):
                # All ranks of an engine say the same. vLLM reads no other answer behind the first one's error, and
                # would take this one for the answer to its next call.
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
        return self.weights.update(weights, source, whole=True, seen=folder is not None)

    def _served(self) -> Path | None:
        """The folder whose configuration the model has; a draft's is read from the same in another way."""
        return None if self.core.borrowed else cached_folder(*self._built_for, self._cache)

    def _restore_tensors(self) -> bool:
        """Put what layer-wise reloading has taken out of the modules back; whether it has taken something.

        It is told that nothing is left for it to do, but to say when the update has ended.
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
        """All tensors of the first weights, or of an update, have come."""
        self.weights.end()
        if self.weights.loaded:
            self.weights_written()

    def weights_written(self) -> None:
        """New weights are there; vLLM's layers may have been told of others, or forgotten theirs."""
