"""The one file of a GPU's results: each part's outcome and last lines, whatever the others do."""

from __future__ import annotations

import sys

from benchmarks import CHECKPOINTS, ROOT
from benchmarks.gpu_report import LAST_LINES, PARTS, write_report


def test_every_part_is_in_the_file_whatever_the_others_do(tmp_path):
    parts = {
        "Good": (sys.executable, "-c", "print('fine')"),
        "Bad": (sys.executable, "-c", "import sys; print('broken'); sys.exit(3)"),
        "Slow": (sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"),
        "Long": (sys.executable, "-c", f"print(*range({LAST_LINES + 5}), sep='\\n')"),
    }
    path = tmp_path / "report.md"
    assert write_report(path, parts, seconds=5) == ["Bad", "Slow"]
    text = path.read_text()
    assert "## Good: passed in" in text
    assert "## Bad: FAILED, exit 3 in" in text
    assert "## Slow: FAILED, stopped after 5 s in" in text
    assert all(said in text for said in ("fine", "broken", "begun", "[5 lines before]"))
    assert "2 of 4 parts passed." in text
    assert sys.executable not in text


def test_every_trained_checkpoint_is_scored():
    *_, option, folder = PARTS["lm-eval beside native vLLM"]
    assert option == "--copies"
    assert ROOT / folder == CHECKPOINTS


def test_parts_are_commands_of_this_checkout():
    assert next(iter(PARTS)) == "Doctor"
    assert all(command[0] == sys.executable for command in PARTS.values())
