"""offline.py with our models warmed up on a CPU, which they are not otherwise, as a GPU's worker does.

A CPU's worker has no registry of what is to be warmed up, so what would go there is kept until the cache is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from offline import main
    from vllm.v1.worker.cpu_worker import CPUWorker

    from atom_plugin.vllm import models
    from atom_plugin.vllm.warmup import ModelWarmUp

    waiting = []
    own = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(worker):
        """The worker's own, after what a GPU's does."""
        waiting.pop().warmup()
        assert not waiting
        return own(worker)

    models.register_warm_up = lambda model, runtime, vllm_config: waiting.append(
        ModelWarmUp(model, runtime, vllm_config)
    )
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
    main()
