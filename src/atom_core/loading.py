"""Checks of a checkpoint before anything is loaded or overwritten, and updates of a served model from files."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch

from atom_core.checkpoint import Checkpoint, config_of
from atom_core.config import ModelConfig
from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_core.mixers.base import RadixAttention
from atom_core.models.decoder import CheckpointModel
from atom_core.models.draft import DraftModel
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_draft_class, load_model_class
from atom_core.quant import QuantConfig, Unquantized
from atom_core.runtime import Runtime, SingleDataParallelRank, SingleRank
from atom_core.spellings import respelled
from atom_core.updates import UNCHANGED, ModelWeights, check_stored_scales
from atom_core.weights import check_checkpoint, expected_tensors, layers_beyond

UNQUANTIZED = Unquantized()


def check_files(
    config: ModelConfig,
    directory: Path | None,
    tensor_parallel_size: int = 1,
    quant: QuantConfig = UNQUANTIZED,
    expert_parallel: bool = False,
    data_parallel_size: int = 1,
) -> None:
    """Build the model on the meta device and compare it with a checkpoint's headers; no tensor is loaded.

    Args:
        config: the model's, or that of a checkpoint's draft layers.
        directory: the checkpoint; None checks only that the model can be built.
        tensor_parallel_size: the number of tensor-parallel ranks.
        quant: the quantisation of the linear layers.
        expert_parallel: whether each rank has whole experts instead of shards of all experts.
        data_parallel_size: the number of data-parallel ranks that share the experts.

    Raises:
        ValueError: damaged files, tensors that do not fit, heads or experts that do not divide over the ranks, or a
            checkpoint without the draft layers.
    """
    model = build_on_meta_device(
        config, torch.bfloat16, tensor_parallel_size, quant, expert_parallel, data_parallel_size
    )
    if directory is None:
        return
    checkpoint = Checkpoint.open(directory)
    if isinstance(model, DraftModel) and not has_drafts(model, checkpoint):
        raise ValueError(
            f"The checkpoint {directory} has no weights to draft with (multi-token prediction): no tensor is called "
            f"{model.own_prefix}*, and {config.num_layers} such layers are wanted ({model.count_key} in config.json, "
            "or as many as its family has). Leave speculative decoding by them out."
        )
    check_checkpoint(model, checkpoint)


def has_drafts(model: DraftModel, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has tensors of these draft layers."""
    return any(name.startswith(model.own_prefix) for name in checkpoint.tensors)


def check_update(
    weights: ModelWeights, config: ModelConfig, directory: Path, quant: QuantConfig, served: Path | None = None
) -> None:
    """Compare the files of a checkpoint with a served model; nothing is written, and only scales are read.

    Every rank checks the whole checkpoint, so all ranks give the same answer.

    Args:
        weights: this rank's.
        config: the model's, or that of a checkpoint's draft layers.
        directory: the checkpoint.
        quant: the quantisation of the linear layers.
        served: the checkpoint that the model was built for, to compare ``config.json`` with; None: unknown.

    Raises:
        ValueError: as :func:`check_files`, or for invalid scales, or for cache scales other than those in use.
    """
    try:
        if served is not None:
            _check_same_config(served, directory)
        check_files(config, directory, quant=quant)
        checkpoint = Checkpoint.open(directory)
        names = dict(respelled(config, expected_tensors(weights.model), checkpoint.tensors.items()))
        weights.model.unread = layers_beyond(weights.model, names)
        check_stored_scales(weights.model, checkpoint)
    except ValueError as error:
        raise ValueError(f"{error} {UNCHANGED}") from error


def _check_same_config(served: Path, directory: Path) -> None:
    """An update changes weights only, so refuse a different ``config.json``; a folder may have none.

    The maximum length and the draft layers may differ: a server has fixed them at start-up.
    """
    if not all((folder / "config.json").is_file() for folder in (served, directory)):
        return
    old, new = (read_model_config(config_of(folder)) for folder in (served, directory))
    new = replace(new, rope=replace(new.rope, max_position=old.rope.max_position))
    names = [it.name for it in fields(ModelConfig) if getattr(old, it.name) != getattr(new, it.name)]
    if changed := [name for name in names if name not in ("max_position", "draft_layers")]:
        said = "; ".join(
            f"{name} is {getattr(new, name)!s:.80}, served is {getattr(old, name)!s:.80}" for name in changed
        )
        raise ValueError(
            f"{directory / 'config.json'} is of another model than {served / 'config.json'}: {said}. An update "
            "changes weights, not config.json; restart the server from the new checkpoint."
        )


def update_from(weights: ModelWeights, config: ModelConfig, directory: Path, quant: QuantConfig) -> None:
    """Overwrite the weights of a served model with a checkpoint's; see :func:`check_update`."""
    check_update(weights, config, directory, quant)
    weights.update(Checkpoint.open(directory).load(), str(directory), whole=True, checked=True)


def build_on_meta_device(
    config: ModelConfig,
    dtype: torch.dtype,
    tensor_parallel_size: int = 1,
    quant: QuantConfig = UNQUANTIZED,
    expert_parallel: bool = False,
    data_parallel_size: int = 1,
) -> CheckpointModel:
    """The first rank's model, or its draft layers, on the meta device: shapes and dtypes without memory.

    Raises:
        ValueError: heads or experts that do not divide over the ranks.
    """
    runtime = Runtime(
        device=torch.device("meta"),
        dtype=dtype,
        kernels=kernel_set(Target("cpu", "")),
        bind=RadixAttention,
        max_model_len=1,
        cache_dtype=dtype,
        quant=quant,
        tensor_parallel=SingleRank(world_size=tensor_parallel_size),
        expert_parallel=expert_parallel,
        data_parallel=SingleDataParallelRank(world_size=data_parallel_size),
    )
    load_class = load_draft_class if config.layers_before else load_model_class
    return load_class(config.architecture)(config, runtime)


def weights_of(model: CheckpointModel, runtime: Runtime) -> ModelWeights:
    """The weights of one rank's model, to be checked against the full model where ranks differ in layers or experts."""
    config = model.config
    alike = not runtime.expert_parallel and len(runtime.pipeline.layers(config.num_layers)) == config.num_layers
    return ModelWeights(
        model, None if alike else lambda: build_on_meta_device(config, runtime.dtype, quant=runtime.quant)
    )
