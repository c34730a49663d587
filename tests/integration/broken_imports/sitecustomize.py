"""On PYTHONPATH, this fails every import of this package but that of the module an entry point names, as a later
version of a framework may: it drops one name that a module of ours imports, and the module is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ENTRY_POINTS = ("atom_plugin", "atom_plugin.vllm", "atom_plugin.sglang")


class Broken(MetaPathFinder):
    """Finds nothing, and says so before anybody else can."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ("atom_core", "atom_plugin") and fullname not in ENTRY_POINTS:
            raise ImportError(f"cannot import name 'Dropped' for {fullname}")
        return None


sys.meta_path.insert(0, Broken())
