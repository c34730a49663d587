"""What tests fork off behaves as a process of its own would."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.integration.preloaded import Preloaded, preloaded, run_script

SCRIPT = """
import colorsys, json, multiprocessing, os, sys

def child(queue):
    queue.put(os.environ["ASKED"])

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    queue = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.Process(target=child, args=(queue,))
    process.start()
    given = {
        "arguments": sys.argv[1:],
        "asked": os.environ.get("ASKED"),
        "taken away": os.environ.get("TAKEN"),
        "of the child": queue.get(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "beside the script": __import__("beside").NAME,
        "found by PYTHONPATH": __import__("elsewhere").NAME,
    }
    process.join()
    print(json.dumps(given))
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(params=[False, True], ids=["started", "forked"])
def forked(request):
    """Whether a script is forked off, within what is asked."""
    if not request.param:
        yield False
        return
    with preloaded(["colorsys", "no_such_module"]):
        yield True


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_has_what_it_would_have(tmp_path, monkeypatch, forked, code):
    monkeypatch.setenv("TAKEN", "yes")
    places = tmp_path / "place"
    places.mkdir()
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (places / "elsewhere.py").write_text("NAME = 'elsewhere'")
    environ = {"ASKED": "this", "TAKEN": None, "PYTHONPATH": os.pathsep.join([str(places), os.environ["PYTHONPATH"]])}
    for _ in range(2):
        finished = run_script(script(tmp_path, SCRIPT), [str(code), "more"], environ, 60)
        assert finished.returncode == code, finished.log
        assert json.loads(finished.log.splitlines()[-1]) == {
            "arguments": [str(code), "more"],
            "asked": "this",
            "taken away": None,
            "of the child": "this",
            "leads its group": True,
            "beside the script": "beside",
            "found by PYTHONPATH": "elsewhere",
        }
    assert "TAKEN" in os.environ


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [("raise ValueError('no')", 1, "ValueError: no"), ("raise SystemExit('why')", 1, "why"), ("exit()", 0, "")],
)
def test_how_it_ends(tmp_path, forked, text, code, says):
    finished = run_script(script(tmp_path, text), [], {}, 60)
    assert finished.returncode == code
    assert says in finished.log


def _runs(stat):
    """Whether the process of ``stat``, a file of the kernel's, has not died."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_one_that_takes_too_long_is_ended_with_what_it_started(tmp_path, forked):
    begun = tmp_path / "begun"
    text = f"""
import os, pathlib, time
child = os.fork()
if child:
    pathlib.Path({str(begun)!r}).write_text(str(child))
    print("begun", flush=True)
time.sleep(60)
"""
    with pytest.raises(AssertionError, match=r"ran longer than 3 s:\n(.*\n)*begun"):
        run_script(script(tmp_path, text), [], {}, 3)
    child = Path(f"/proc/{begun.read_text()}/stat")
    end = time.monotonic() + 30  # it has its signal, and dies of it when its turn comes
    while _runs(child):
        assert time.monotonic() < end, "its child is still there"
        time.sleep(0.05)
    assert run_script(script(tmp_path, ""), [], {}, 60).returncode == 0


def test_one_that_has_ended_before_anyone_looks_is_not_waited_for(tmp_path, monkeypatch):
    answer = Preloaded._answer

    def late(self):
        time.sleep(1)
        return answer(self)

    monkeypatch.setattr(Preloaded, "_answer", late)
    with preloaded(["colorsys"]):
        assert run_script(script(tmp_path, "raise SystemExit(7)"), [], {}, 10).returncode == 7
