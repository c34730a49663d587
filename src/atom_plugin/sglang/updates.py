"""Loading weights from SGLang, at the start and while serving.

When an update reaches a model, it is only a stream of tensors, and an error ends the server: SGLang rolls back to the
folder that was just refused, or does not catch the error. So plug-in hooks wrap two of SGLang's methods. They compare
the files with the model before SGLang opens them, and return an error as the call's result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.runtime_context import get_server_args
from torch import nn

from atom_core.checkpoint import EMBEDDING, HEAD, Checkpoint
from atom_core.language_model import alone
from atom_core.loading import check_update, has_drafts, weights_of
from atom_core.models.draft import DraftModel
from atom_core.runtime import Runtime
from atom_core.updates import ModelWeights
from atom_core.weights import unread_layers
from atom_plugin.common.hub import cached_folder, patterns, whole_folder
from atom_plugin.common.wrapped_model import WrappedModel
from atom_plugin.sglang.warmup import warm_up

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

logger = logging.getLogger("sglang.atom_plugin")

#: The name in errors of tensors that come from no folder.
TENSORS = "an update"


class SessionMethod(QuantizeMethodBase):
    """The ``quant_method`` by which SGLang signals that an update of weights begins and has ended."""

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        """Never called."""
        raise AssertionError("UpdateSession has no weight")

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """The update begins."""
        if self.weights.loaded:
            self.weights.begin()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """The update has ended."""
        self.weights.end()


class UpdateSession(nn.Module):
    """A module that has :class:`SessionMethod`."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__()
        self.quant_method = SessionMethod(weights)


class AtomModel(WrappedModel):
    """The base of our model classes in SGLang: loads and updates their weights."""

    #: SGLang must not fall back to pickles if there are no safetensors.
    fall_back_to_pt_during_load = False
    runtime: Runtime
    #: The folder, for errors.
    checkpoint: str

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> ModelConfigForExpertLocation | None:
        """None: experts stay on the ranks that loaded them, and SGLang does not count them."""
        return None

    @property
    def allow_patterns_overrides(self) -> list[str] | None:
        """The weight files that SGLang may read: the same that our check of headers reads."""
        return patterns(self.checkpoint if self._folder is None else self._folder[0], *self._hub())

    def _hub(self) -> tuple[str | None, str | None]:
        """The revision and the download folder of a model that is a name on a hub."""
        args = get_server_args()
        return args.revision, args.download_dir

    def set_up_weights(self) -> None:
        """Called once, after the core is built."""
        self.weights = weights_of(self.core, self.runtime)
        self.update_session = UpdateSession(self.weights)
        self._folder: tuple[str, bool] | None = None
        #: The folder of all current weights; "" if they come from several places.
        self.folder = ""
        for buffer in self.core.buffers():
            buffer._skip_weight_check = True  # tables, which no checkpoint and no update has

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights the first time. Later calls update all of them within :meth:`updating_from`, else any.

        Raises:
            ValueError: tensors do not fit the model; the message lists all of them.
        """
        if not self.weights.loaded:
            self.weights.load(weights, self.checkpoint)
            self.weights.close()
            self.folder = self.checkpoint
            first = self.runtime.tensor_parallel.rank == self.runtime.data_parallel.rank == 0
            if first and (line := unread_layers(self.core, self.checkpoint)):
                logger.info(line)
        elif self._folder is not None:
            folder, checked = self._folder
            self.weights.update(weights, folder, whole=True, checked=checked)
        else:
            self.folder = ""
            self.weights.update(weights, TENSORS, whole=False)

    def prepare_before_cuda_graph_capture(self, model_runner: ModelRunner) -> None:
        """What SGLang calls on a GPU once pools are there, with graphs and without."""
        warm_up(self.core, self.runtime, model_runner)

    def post_load_weights(self) -> None:
        """Called instead of :meth:`load_weights` with ``--load-format dummy``."""
        self.weights.close()

    def why_no_update(self, folder: str) -> str:
        """Why an update from a folder leaves this model as it is; empty: it does not.

        SGLang updates a target before its draft, and Transformers saves no layers that draft.
        """
        if not isinstance(self.core, DraftModel):
            return ""
        found = whole_folder(folder, *self._hub())
        try:
            if found is None or has_drafts(self.core, Checkpoint.open(found)):
                return ""
        except ValueError:  # reported by the update
            return ""
        return (
            f"{folder} has no layers to draft with ({self.core.own_prefix}*): the draft keeps the weights that it has, "
            "and drafts for the new ones."
        )

    @contextmanager
    def updating_from(self, folder: str) -> Iterator[None]:
        """Within this context :meth:`load_weights` gets all weights of a folder, or of a name on a hub.

        Raises:
            ValueError: the folder's files do not fit; nothing was overwritten.
        """
        found = whole_folder(folder, *self._hub())
        if found is not None:
            # A draft reads the same config differently.
            served = None if self.core.borrowed else cached_folder(self.checkpoint, *self._hub())
            check_update(self.weights, self.core.config, found, self.runtime.quant, served)
        self._folder = folder, found is not None
        try:
            yield
        finally:
            self._folder = None
            self.weights.end()

    def get_weights_by_name(self, name: str, truncate_size: int = 100, tp_size: int = 1) -> list[Any] | None:
        """The first rows of a tensor; None if it does not exist.

        Args:
            name: a checkpoint's name, for the tensor gathered over tensor-parallel ranks; or the model's own name
                ("qkv_proj", "gate_up_proj"), for this rank's shard in its loaded form.
            truncate_size: the number of rows.
            tp_size: the number of ranks.
        """
        tied = alone(name) == HEAD and self.core.config.tie_word_embeddings
        mine = self.weights.read(EMBEDDING if tied else name)
        if mine is None:
            parameter = self.read_parameter(name)
            shard: list[Any] | None = None if parameter is None else parameter[:truncate_size].float().tolist()
            return shard
        if tp_size > 1:
            here = ~mine.isnan()
            ranks = self.runtime.tensor_parallel.all_reduce(here.float())
            mine = self.runtime.tensor_parallel.all_reduce(mine.nan_to_num(0.0)) / ranks
        rows: list[Any] = mine[:truncate_size].tolist()
        return None if bool(mine.isnan().all()) else rows


def update_from_disk(
    original: Callable[..., tuple[bool, str]], updater: WeightUpdater, model_path: str, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Around ``WeightUpdater.update_weights_from_disk``."""
    model = updater.get_model()
    if not isinstance(model, AtomModel):
        return original(updater, model_path, *args, **kwargs)
    before = updater.model_config.model_path
    if reason := model.why_no_update(model_path):
        logger.info(reason)
        return True, reason
    try:
        with model.updating_from(model_path):
            updated, message = original(updater, model_path, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the server continues after any error and reports it
        # Nothing is written yet, or SGLang's rollback has read the same folder again.
        updated, message = False, f"Failed to update weights: {error}"
    if not updated:
        updater.model_config.model_path = before
        if model.weights.complete or model.folder != before:
            return False, message
        logger.error("%s The weights of %s are read again.", message, before)
        try:
            with model.updating_from(before):
                original(updater, before, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as above
            return False, f"{message} The previous weights, of {before}, cannot be read again: {error}"
        return False, f"{message} The previous weights, of {before}, are restored."
    model.folder = model_path
    return True, message


def check_weights(original: Callable[..., Any], runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.check_weights``, which reads and overwrites parameters in their loaded form."""
    if not isinstance(runner.model, AtomModel):
        return original(runner, *args, **kwargs)
    with runner.model.opened():
        return original(runner, *args, **kwargs)


def update_from_tensor(
    original: Callable[..., tuple[bool, str]], updater: WeightUpdater, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Around ``WeightUpdater.update_weights_from_tensor``: returns an error if tensors do not fit."""
    if not isinstance(updater.get_model(), AtomModel):
        return original(updater, *args, **kwargs)
    try:
        return original(updater, *args, **kwargs)
    except ValueError as error:
        return False, f"Failed to update weights: {error}"
