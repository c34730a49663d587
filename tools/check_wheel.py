"""Ask an installed wheel, with only the standard library, whether it has what users and frameworks look for."""

from __future__ import annotations

import importlib
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

ENTRY_POINTS = {
    ("console_scripts", "atom-plugin"),
    ("sglang.srt.plugins", "atom"),
    ("vllm.general_plugins", "atom"),
    ("vllm.platform_plugins", "atom"),
}


def main() -> None:
    """Fail with what is missing."""
    installed = distribution("atom-plugin")
    points = {(point.group, point.name): point for point in installed.entry_points}
    assert set(points) == ENTRY_POINTS, f"entry points: {sorted(points)}"
    for point in points.values():
        # The frameworks' entry points promise to import without torch.
        if point.group != "console_scripts":
            assert callable(getattr(importlib.import_module(point.module), point.attr)), point
    for package in ("atom_core", "atom_plugin"):
        spec = find_spec(package)
        assert spec is not None, f"{package} cannot be found"
        assert spec.origin is not None, f"{package} is not a regular package"
        folder = Path(spec.origin).parent
        assert "site-packages" in folder.parts, f"{package} comes from {folder}"
        assert (folder / "py.typed").exists(), f"{package} has no py.typed"
    print(f"{installed.name} {installed.version}: {len(points)} entry points, both packages typed")


if __name__ == "__main__":
    main()
