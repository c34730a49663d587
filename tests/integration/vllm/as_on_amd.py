"""Engines as on an AMD GPU, but on this CPU: kernels are chosen for what GPU_ARCHS names, and aiter is the fake."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))

from atom_core.kernels.select import Target

Target.of = classmethod(lambda cls, device: cls("rocm", os.environ["GPU_ARCHS"]))

if __name__ == "__main__":
    from tests.integration.vllm.offline import main

    main()
