"""Write what pages show of the code: each block between markers is the output of the command that its marker names.

    <!-- generated: atom-plugin models --markdown -->
    <!-- end of generated -->

Run `python tools/generated.py` after a change; a unit test fails while a page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from atom_plugin.cli import app

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: atom-plugin (.+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages that may have such blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def updated(text: str) -> str:
    """The page with each block as its command prints it now."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{_output(match[2]).strip()}\n\n{match[3]}", text)


def _output(command: str) -> str:
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, f"atom-plugin {command}: {result.output}"
    return result.output


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
