"""Resolve command lines, one after the other in one process: what SGLang says to each.

Reads a JSON list of {"flags": ..., "environ": ...} from the file that the first argument names, and writes a list of
messages, or null where SGLang took it, to the second.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def problem(flags: list[str], environ: dict[str, str]) -> str | None:
    """What the user would see, before any process is started that loads weights."""
    from sglang.srt.server_args import prepare_server_args

    # It was set while plug-ins were loaded, as it is where a server of ours is started.
    os.environ.pop(PACKAGE, None)
    os.environ.update(environ)
    try:
        prepare_server_args(flags).resolve_once()
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the user sees
        return f"{type(error).__name__}: {error}"
    finally:
        for name in environ:
            os.environ.pop(name, None)
    return None


if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()
    given, wanted = map(Path, sys.argv[1:])
    wanted.write_text(json.dumps([problem(**case) for case in json.loads(given.read_text())]))
