"""Models that SGLang builds, one after the other in one process, without weights: the names that they have.

Reads a JSON list of folders from the file that the first argument names, and writes for each its parameters' shapes by
name and the names of its modules to the second.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def names_of(folder: str) -> Any:
    """Of one model. The first makes the groups of its only rank."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    flags = f"--model-path {folder} --device cpu --load-format dummy --skip-tokenizer-init --dtype float32"
    arguments = prepare_server_args([*flags.split(), "--mem-fraction-static", "0.5"])
    publish(arguments, role="scheduler", ranks=SpawnRanks(**dict.fromkeys(inspect.signature(SpawnRanks).parameters, 0)))
    if not torch.distributed.is_initialized():
        where = f"file://{tempfile.mkdtemp()}/ranks"
        init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=where)
        initialize_model_parallel()
    with set_default_torch_dtype(torch.float32):
        model = _initialize_model(ModelConfig.from_server_args(arguments), LoadConfig())
    parameters = {name: list(it.shape) for name, it in model.named_parameters()}
    return type(model).__module__, parameters, [name for name, _ in model.named_modules()]


if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()
    given, wanted = map(Path, sys.argv[1:])
    wanted.write_text(json.dumps([names_of(folder) for folder in json.loads(given.read_text())]))
