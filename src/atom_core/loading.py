"""From the files of a checkpoint to a model's weights: what is looked at before anything is loaded or overwritten."""

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
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_draft_class, load_model_class
from atom_core.quant import QuantConfig, Unquantized
from atom_core.runtime import Runtime, SingleDataParallelRank, SingleRank
from atom_core.updates import UNCHANGED, ModelWeights, check_stored_scales
from atom_core.weights import check_checkpoint, layers_behind

UNQUANTIZED = Unquantized()


def check_files(
    config: ModelConfig,
    directory: Path | None,
    tensor_parallel_size: int = 1,
    quant: QuantConfig = UNQUANTIZED,
    expert_parallel: bool = False,
    data_parallel_size: int = 1,
) -> None:
    """Lay the model out without memory and compare it with a checkpoint's headers; no tensor is loaded.

    Args:
        config: the model, or the layers of a checkpoint that draft.
        directory: the checkpoint; None checks the layout alone.
        tensor_parallel_size: ranks that would share the layers.
        quant: of the linear layers.
        expert_parallel: whether the ranks would share out experts whole.
        data_parallel_size: data-parallel ranks, which split the experts.

    Raises:
        ValueError: damaged files, tensors that do not fit, heads or experts that do not divide over the ranks, or a
            checkpoint that has no tensor of the layers that draft.
    """
    model = lay_out(config, torch.bfloat16, tensor_parallel_size, quant, expert_parallel, data_parallel_size)
    if directory is None:
        return
    checkpoint, first = Checkpoint.open(directory), f"model.layers.{config.layers_before}."
    if config.layers_before and not any(name.startswith(first) for name in checkpoint.tensors):
        raise ValueError(
            f"The checkpoint {directory} has no weights to draft with (multi-token prediction): config.json says "
            f"num_nextn_predict_layers={config.num_layers}, but no tensor is called {first}*. Leave speculative "
            "decoding by them out."
        )
    check_checkpoint(model, checkpoint)


def check_update(
    weights: ModelWeights, config: ModelConfig, directory: Path, quant: QuantConfig, served: Path | None = None
) -> None:
    """Compare the files of a checkpoint with a model that serves; nothing is written, and only scales are read.

    Each rank looks at the whole checkpoint, so that all say the same.

    Args:
        weights: this rank's.
        config: the model's, or that of a checkpoint's layers that draft.
        directory: the checkpoint.
        quant: of the linear layers.
        served: the checkpoint that the model was built for, whose ``config.json`` must say the same; None: unknown.

    Raises:
        ValueError: as :func:`check_files`, or scales that are none, or not those in use of the cache.
    """
    try:
        if served is not None:
            _check_same_config(served, directory)
        check_files(config, directory, quant=quant)
        checkpoint = Checkpoint.open(directory)
        weights.model.unread = layers_behind(weights.model, checkpoint.tensors)
        check_stored_scales(weights.model, checkpoint)
    except ValueError as error:
        raise ValueError(f"{error} {UNCHANGED}") from error


def _check_same_config(served: Path, directory: Path) -> None:
    """Weights alone are updated: where the configuration says something else, the model would be another.

    A folder without one has weights alone. How long a sequence may be, and whether drafts are in the checkpoint, a
    server has settled before.
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
            f"{directory / 'config.json'} is of another model than {served / 'config.json'}: {said}. Weights can be "
            "updated, not what stands in config.json; start anew from it."
        )


def update_from(weights: ModelWeights, config: ModelConfig, directory: Path, quant: QuantConfig) -> None:
    """Write a checkpoint's weights over those of a model that serves; see :func:`check_update`."""
    check_update(weights, config, directory, quant)
    weights.update(Checkpoint.open(directory).load(), str(directory), whole=True, seen=True)


def lay_out(
    config: ModelConfig,
    dtype: torch.dtype,
    tensor_parallel_size: int = 1,
    quant: QuantConfig = UNQUANTIZED,
    expert_parallel: bool = False,
    data_parallel_size: int = 1,
) -> CheckpointModel:
    """The first rank's model, or layers that draft, without memory: parameters have shapes and dtypes, and no numbers.

    Raises:
        ValueError: heads or experts that do not divide over the ranks.
    """
    runtime = _without_memory(dtype, tensor_parallel_size, quant, expert_parallel, data_parallel_size)
    if config.layers_before:
        return load_draft_class(config.architecture)(config, runtime)
    return load_model_class(config.architecture)(config, runtime)


def weights_of(model: CheckpointModel, runtime: Runtime) -> ModelWeights:
    """The weights of a rank's model, which knows the whole model's where ranks hold different layers or experts."""
    config = model.config
    alike = not runtime.expert_parallel and len(runtime.pipeline.layers(config.num_layers)) == config.num_layers
    return ModelWeights(model, None if alike else lambda: lay_out(config, runtime.dtype, quant=runtime.quant))


def _without_memory(
    dtype: torch.dtype,
    tensor_parallel_size: int,
    quant: QuantConfig,
    expert_parallel: bool,
    data_parallel_size: int,
) -> Runtime:
    return replace(
        Runtime(
            device=torch.device("meta"),
            dtype=dtype,
            kernels=kernel_set(Target("cpu", "")),
            bind=RadixAttention,
            max_model_len=1,
            cache_dtype=dtype,
            quant=quant,
        ),
        tensor_parallel=SingleRank(world_size=tensor_parallel_size),
        expert_parallel=expert_parallel,
        data_parallel=SingleDataParallelRank(world_size=data_parallel_size),
    )
