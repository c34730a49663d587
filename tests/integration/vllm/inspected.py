"""vLLM's own classes of the architectures that we have, looked at in one process.

vLLM looks at each class in a process of its own, which imports all of vLLM for it, and keeps what it found on disk.
Most tests start an engine of a class that nobody has looked at yet. Here the same code of vLLM's looks at all of them,
in this process.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from tests.integration.processes import run_group

#: vLLM's own draft by layers of the checkpoint itself, for each class of ours. vLLM looks at it before it knows that a
#: model is ours.
THEIR_DRAFTS = {
    "DeepseekV3Draft": "DeepSeekMTPModel",
    "Qwen3NextDraft": "Qwen3NextMTP",
    "Qwen35Draft": "Qwen3_5MTP",
    "Qwen35MoeDraft": "Qwen3_5MoeMTP",
}
STAND_INS = Path(__file__).with_name("stand_ins")


@functools.cache
def inspect_all() -> None:
    """Have all of them looked at, once for a run of the tests."""
    path = [str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])]
    finished = run_group([sys.executable, __file__], {"PYTHONPATH": os.pathsep.join(path)}, 300)
    assert finished.returncode == 0, finished.tail()


def main() -> None:
    """Look at each class; a version of vLLM may not have all models, but has all drafts."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry

    from atom_core.models.registry import supported_architectures

    registry._run_in_subprocess = lambda look: look()
    known = [architecture for architecture in supported_architectures() if architecture in ModelRegistry.models]
    for architecture in (*known, *THEIR_DRAFTS.values()):
        ModelRegistry.models[architecture].inspect_model_cls()


if __name__ == "__main__":
    main()
