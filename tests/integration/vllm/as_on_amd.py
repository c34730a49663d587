"""Engines as on an AMD GPU, but on this CPU: see :mod:`tests.integration.amd`. vLLM's FP8 is the GPU's too."""

from __future__ import annotations

import os

from tests.integration.amd import simulate

if __name__ == "__main__":
    simulate()

    from vllm.platforms.interface import Platform

    from atom_core.kernels.aiter_library import FP8
    from tests.integration.vllm.offline import main

    Platform.fp8_dtype = classmethod(lambda cls: FP8[os.environ["GPU_ARCHS"]])
    main()
