"""Read from a checkout of aiter the signatures of the functions that our kernels call, without importing it.

    python tools/aiter_signatures.py CHECKOUT

rewrites tests/fakes/aiter_signatures.json for the commit that is checked out. A function that is called anew is first
entered there by hand, with the file that defines it. What this changes is to be read: the fake and the calls follow.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

RECORD = Path(__file__).parents[1] / "tests" / "fakes" / "aiter_signatures.json"


def git(checkout: Path, *arguments: str) -> str:
    """What git answers."""
    return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True).stdout


def signature(source: str, name: str) -> str:
    """The signature of the last function ``name`` at the top of a file, which is the one that importing leaves.

    "Class.method" is one of a class there.
    """
    body: list[ast.stmt] = ast.parse(source).body
    owner, _, name = name.rpartition(".")
    if owner:
        body = [it for node in body if isinstance(node, ast.ClassDef) and node.name == owner for it in node.body]
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise SystemExit(f"there is no function {name}")
    arguments = found[-1].args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if isinstance(argument.annotation, ast.Constant):  # a string
            argument.annotation = ast.parse(argument.annotation.value, mode="eval").body
    return f"({ast.unparse(arguments)})"


def main() -> None:
    """See the module's text."""
    checkout = Path(sys.argv[1])
    record = json.loads(RECORD.read_text())
    record["commit"] = git(checkout, "rev-parse", "HEAD").strip()
    for path, entry in record["functions"].items():
        entry["signature"] = signature(git(checkout, "show", f"HEAD:{entry['file']}"), path.rpartition(".")[2])
    for path, entry in record["methods"].items():
        entry["signature"] = signature(git(checkout, "show", f"HEAD:{entry['file']}"), path)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
