"""offline.py where states have the dtype that flags and checkpoints say, as on a GPU.

On processors with AVX-512 BF16 vLLM's platform for CPUs makes it float32, for kernels of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from offline import main
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config):
        """vLLM's, but for that dtype."""
        cache = vllm_config.cache_config
        asked = cache.mamba_ssm_cache_dtype
        own(vllm_config)
        cache.mamba_ssm_cache_dtype = asked

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    main()
