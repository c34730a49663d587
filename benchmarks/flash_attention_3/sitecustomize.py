"""Python imports this at its start where this folder is in PYTHONPATH: `sgl_kernel.flash_attn` is the module beside it.

SGLang's schedulers are processes of their own, so a replacement in one process would not reach them.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See :class:`MetaPathFinder`."""
        if fullname != "sgl_kernel.flash_attn":
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name("flash_attn.py"))


sys.meta_path.insert(0, _Finder())
