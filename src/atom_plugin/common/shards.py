"""Checks of one rank's weights that a framework saves and loads by the model's own names (``sharded_state``).

The frameworks' loaders copy a file's tensor to the parameter of its name, even if the tensor is smaller. The files are
for one number of ranks and one quantisation. So they are compared with the model before they are loaded.
"""

from __future__ import annotations

from pathlib import Path

import torch

from atom_core.checkpoint import Checkpoint
from atom_core.weights import Mismatch, dtype_name
from atom_plugin.common.load_formats import SHARDED_STATE
from atom_plugin.common.wrapped_model import WrappedModel

#: The frameworks' default file names.
PATTERN = "model-rank-{rank}-part-{part}.safetensors"


def check_shards(model: WrappedModel, directory: Path, pattern: str) -> None:
    """Compare a rank's files, which match ``pattern``, with ``model``, which is built and not loaded.

    Raises:
        ValueError: there are no files, or they do not fit (another model, number of ranks or quantisation).
    """
    found = Checkpoint.of_files(directory, pattern).tensors
    if not found:
        raise ValueError(
            f"--load-format {SHARDED_STATE}: {directory} has no file {pattern} with this rank's weights. "
            "Save them with save_sharded_state (vLLM) or save_sharded_model (SGLang), or leave the flag out."
        )
    state: dict[str, torch.Tensor] = model.state_dict()
    # If several names share one tensor, files have only the first.
    places = {name: (it.data_ptr(), it.shape) for name, it in state.items()}
    given = {places[name] for name in found if name in places}
    mismatch = Mismatch(missing=sorted(name for name, it in state.items() if it.numel() and places[name] not in given))
    for name, info in found.items():
        if name not in state:
            mismatch.unexpected.append(f"{name} in {info.file.name}")
        elif (shape := tuple(state[name].shape)) != info.shape:
            mismatch.misshapen.append(f"{name} is {list(info.shape)}, should be {list(shape)}")
        elif (dtype := dtype_name(state[name])) != info.dtype:
            mismatch.misshapen.append(f"{name} is stored as {info.dtype}, should be {dtype}")
    mismatch.raise_if_any(
        model.core.config.architecture,
        f"--load-format {SHARDED_STATE}: {pattern} in {directory} does",
        "Load these files with the number of ranks, --dtype, --quantization and kernels with which atom-plugin has "
        "saved them.",
    )
