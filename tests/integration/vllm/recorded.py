"""offline.py with a model warmed up on a CPU, as :mod:`warmed` does it, that writes what is launched.

See :mod:`tests.integration.recorded_launches`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    from offline import main
    from vllm.v1.worker.cpu_worker import CPUWorker

    from atom_plugin.vllm import models
    from atom_plugin.vllm.warmup import ModelWarmUp
    from tests.integration.recorded_launches import record

    recorder, waiting = record(), []
    own = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(worker):
        """The worker's own, after what a GPU's does."""
        with recorder.warm_up():
            waiting.pop().warmup()
        return own(worker)

    models.register_warm_up = lambda model, runtime, vllm_config: waiting.append(
        ModelWarmUp(model, runtime, vllm_config)
    )
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
    main()
