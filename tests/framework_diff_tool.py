"""`tools/framework_diff.py` as a module: it is a script beside the packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOL = Path(__file__).parents[1] / "tools" / "framework_diff.py"


def load_framework_diff() -> ModuleType:
    """The tool, imported anew."""
    specification = importlib.util.spec_from_file_location("framework_diff", TOOL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module
