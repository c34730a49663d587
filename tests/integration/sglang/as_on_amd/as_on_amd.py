"""A plug-in for SGLang that makes a CPU one of AMD's GPUs in the eyes of our adapter, for tests.

See :mod:`tests.integration.amd`; and our adapter is told that this is ROCm, so that SGLang's name of aiter's attention
is ours there. SGLang itself goes on as on a CPU, but for the FP8 of its pools, which is the GPU's. A folder with this
module and its metadata on PYTHONPATH is all it takes for SGLang to load it, before our own plug-in, in all of its
processes.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Called by SGLang when it loads its plug-ins."""
    from sglang.srt import utils
    from sglang.srt.mem_cache import kv_cache_dtype

    from atom_core.kernels.aiter_library import FP8
    from tests.integration.amd import simulate

    on_rocm = utils.is_hip

    def is_hip() -> bool:
        return sys._getframe(1).f_globals["__name__"].startswith("atom_plugin.") or bool(on_rocm())

    utils.is_hip = is_hip
    kv_cache_dtype._is_hip, kv_cache_dtype.fp8_dtype = True, FP8[os.environ["GPU_ARCHS"]]
    simulate()
