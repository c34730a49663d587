"""Makes `src/atom_core/hf_keys.json`: the keys of `config.json` to which some model class gives a meaning.

    python tools/config_keys.py FOLDER...

Each FOLDER is an environment or `site-packages` with Transformers, vLLM or SGLang: their sources are read, nothing is
imported. Without an argument, the packages beside the running Python are read and compared with the file: exit code 1
and a list, where they have keys that it lacks.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEYS = ROOT / "src" / "atom_core" / "hf_keys.json"
#: Where classes of configurations stand, and where models read them.
CONFIGURATIONS = (
    "transformers/models/*/configuration_*.py",
    "vllm/transformers_utils/configs/**/*.py",
    "sglang/srt/configs/*.py",
)
READERS = ("vllm/model_executor/models/*.py", "vllm/models/**/*.py", "sglang/srt/models/*.py")
#: Names of objects that are a model's configuration where a model reads it.
OBJECTS = {"config", "hf_config", "text_config", "hf_text_config", "model_config", "pretrained_config"}
#: What such an object has beside keys.
METHODS = set(
    "to_dict to_json_string get_text_config from_dict update get hf_config hf_text_config text_config dtype "
    "quantization is_first_rank architectures model_type items keys values copy".split()
)


def main(arguments: list[str]) -> int:
    """Write the file, or compare it."""
    sys.path.insert(0, str(ROOT / "src"))
    from atom_core.hf_keys import HARMLESS

    if arguments:
        found = sorted({key for folder in arguments for key in keys_of(Path(folder))} - HARMLESS.keys())
        KEYS.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{len(found)} keys in {KEYS.relative_to(ROOT)}")
        return 0
    missing = missing_keys(Path(sysconfig.get_path("purelib")))
    print("\n".join(missing) or "nothing is missing")
    return int(bool(missing))


def missing_keys(folder: Path) -> list[str]:
    """Keys to which the packages in `folder` give a meaning, and of which neither the file nor the table knows."""
    from atom_core.hf_keys import HARMLESS, meaningful

    return sorted(keys_of(folder) - meaningful() - HARMLESS.keys())


def keys_of(folder: Path) -> set[str]:
    """All keys of the packages in `folder`."""
    places = [folder, *folder.glob("lib/python*/site-packages")]
    keys: set[str] = set()
    for place in places:
        for pattern in CONFIGURATIONS:
            for path in place.glob(pattern):
                keys |= set(_fields(ast.parse(path.read_text())))
        for pattern in READERS:
            for path in place.glob(pattern):
                keys |= set(_read(ast.parse(path.read_text())))
    return {key for key in keys if key.isidentifier() and key.islower() and not key.startswith("_")} - METHODS


def _fields(tree: ast.Module) -> Iterator[str]:
    """Fields of classes of configurations, and arguments of their constructors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    yield from (argument.arg for argument in (*item.args.args, *item.args.kwonlyargs))


def _read(tree: ast.Module) -> Iterator[str]:
    """Attributes that are read of a configuration, by name or by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            of_config = len(node.args) > 1 and _is_config(node.args[0])
            yield from (str(it.value) for it in node.args[1:2] if of_config and isinstance(it, ast.Constant))


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in OBJECTS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
