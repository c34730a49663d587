"""Write what pages show of the code: each block between markers is the output of the command that its marker names.

    <!-- generated: atom-plugin models --markdown -->
    <!-- generated: python -m benchmarks.launches -->
    <!-- end of generated -->

Run `python tools/generated.py` after a change; a unit test fails while a page is out of date.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from atom_plugin.cli import app

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: ([^\n]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages that may have such blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def updated(text: str) -> str:
    """The page with each block as its command prints it now."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{_output(match[2]).strip()}\n\n{match[3]}", text)


def _output(command: str) -> str:
    program, *arguments = command.split()
    if program == "python":
        # Triton's interpreter, which tests run kernels in, is not what they are launched by on a GPU.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        run = [sys.executable, *arguments]
        return subprocess.run(run, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert program == "atom-plugin", f"a page names a command that is not known: {command}"
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
