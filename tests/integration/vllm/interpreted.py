"""offline.py for the newer model runner on a CPU, where a kernel's programs run one after the other.

vLLM copies a state by 16 of them for each request and layer, and starts them in each step to find that nothing is to be
copied. One does as well, and takes a third of the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from offline import main
    from vllm.v1.worker import mamba_utils

    assert mamba_utils._TEMPORAL_TILES > 1
    mamba_utils._TEMPORAL_TILES = 1
    main()
