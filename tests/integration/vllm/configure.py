"""Make engine configurations, or engines, one after the other in one process: what is wrong with each.

Reads a JSON list of {"args": ..., "environ": ..., "build": ...} from the file that the first argument names, and writes
a list of messages, or null where vLLM took it, to the second.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def problem(args: dict[str, Any], environ: dict[str, str], build: bool) -> str | None:
    """What vLLM says to these arguments: to the configuration alone, or, with `build`, also to the engine."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    os.environ.update(environ)
    try:
        if build:
            LLM(**{"kv_cache_memory_bytes": 2**28, **args})
        else:
            EngineArgs(**args).create_engine_config()
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the user sees
        return f"{type(error).__name__}: {error}"
    finally:
        for name in environ:
            del os.environ[name]
    return None


if __name__ == "__main__":
    given, wanted = map(Path, sys.argv[1:])
    wanted.write_text(json.dumps([problem(**case) for case in json.loads(given.read_text())]))
