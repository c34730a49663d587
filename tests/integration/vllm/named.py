"""Models that vLLM builds, one after the other in one process, without weights: the names that they have.

Reads a JSON list of folders from the file that the first argument names, and writes for each, ours and vLLM's own, the
parameters' shapes by name and the names of modules to the second. The first must be of a mixture: vLLM makes groups of
ranks as its model needs them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def names_of(folder: str, implementation: str) -> Any:
    """Of one model. The first makes the groups of its only rank."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        folder,
        model_impl=implementation,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/ranks", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = initialize_model(config)
    parameters = {name: list(it.shape) for name, it in model.named_parameters()}
    return type(model).__name__, parameters, [name for name, _ in model.named_modules()]


if __name__ == "__main__":
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    given, wanted = map(Path, sys.argv[1:])
    folders = json.loads(given.read_text())
    wanted.write_text(json.dumps([[names_of(folder, it) for it in ("atom", "vllm")] for folder in folders]))
