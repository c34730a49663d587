"""offline.py with our models compiled on a CPU, which they are not otherwise: what a GPU would trace is traced here.

`is_compiled` is the one question that decides it; it is answered by the mode alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from offline import main
    from vllm.config import CompilationMode

    from atom_plugin.vllm import attention

    attention.is_compiled = lambda vllm_config: vllm_config.compilation_config.mode != CompilationMode.NONE
    main()
