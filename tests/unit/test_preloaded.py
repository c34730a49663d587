"""What tests fork off behaves as a process of its own would."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.preloaded import Preloaded, preloaded, run_script, start_python
from tests.integration.processes import end_group, living_of_group, temporary_log

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
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("raise SystemExit('why')", 1, "why"),
        ("raise SystemExit(['why'])", 1, "['why']"),
        ("exit()", 0, ""),
        ("import atexit; atexit.register(print, 'at last'); raise SystemExit(4)", 4, "at last"),
        (
            "import threading as t, time; t.Thread(target=lambda: time.sleep(1) or print('at last')).start()",
            0,
            "at last",
        ),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
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


def start(command, environ=None):
    """The process of a command, and the file that it prints to."""
    log = temporary_log()
    return start_python(command, {**os.environ, **(environ or {})}, log), Path(log.name), log


#: As a program of several files, some of it run by another process of its own.
PROGRAM = """
import json, multiprocessing, os, sys
from place.name import NAME

def child(queue):
    queue.put([__name__, os.environ["ASKED"]])

if __name__ == "__main__":
    queue = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.Process(target=child, args=(queue,))
    process.start()
    print(json.dumps({
        "arguments": sys.argv,
        "name": [__name__, NAME, getattr(__spec__, "name", None), sys.modules["__main__"].child is child],
        "first place": os.path.realpath(sys.path[0]),
        "of the child": queue.get(),
        "group": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
        "input": os.readlink("/proc/self/fd/0"),
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
        "folder": os.getcwd(),
    }))
    process.join()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A package `place` with modules, in the current folder, where a command `program` is too."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "name.py").write_text("NAME = 'found'")
    (folder / "program.py").write_text(PROGRAM)
    command = tmp_path / "program"
    command.write_text(f"#!{sys.executable}\n{PROGRAM}")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("way", ["a module", "a script", "a command"])
def test_a_command_has_what_it_would_have(program, forked, way):
    module, script = str(program / "place" / "program.py"), str(program / "program")
    command = {
        "a module": [sys.executable, "-m", "place.program", "--one"],
        "a script": [sys.executable, script, "--one"],
        "a command": [script, "--one"],
    }[way]
    process, printed, _log = start(command, {"ASKED": "this"})
    assert process.wait(60) == 0, printed.read_text()
    (line,) = printed.read_text().splitlines()
    assert json.loads(line) == {
        "arguments": [module if way == "a module" else script, "--one"],
        "name": ["__main__", "found", "place.program" if way == "a module" else None, True],
        "first place": str(program.resolve()),
        "of the child": ["__main__", "this"],
        "group": [True, True],
        "input": os.devnull,
        "files": [0, 1, 2],
        "folder": str(program),
    }


def test_it_has_no_file_of_others_open(tmp_path):
    text = "import os; print([os.readlink(f'/proc/self/fd/{it}') for it in (0, 1, 2)], os.listdir('/proc/self/fd'))"
    with preloaded(["colorsys"]):
        for _ in range(2):
            process, printed, _log = start([sys.executable, str(script(tmp_path, text))])
            process.wait(60)
            links, files = printed.read_text().split("] [")
            assert links.count(str(printed)) == 2
            # The last one is of the folder that is listed.
            assert files.count(",") == 3


def test_what_one_finds_by_pythonpath_is_not_there_for_the_next(tmp_path):
    """Also where the first one is that for which the modules were imported."""
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "elsewhere.py").write_text("")
    it = script(tmp_path, "import elsewhere")
    path = os.environ["PYTHONPATH"]
    with preloaded(["colorsys"]):
        more = os.pathsep.join([str(tmp_path / "place"), path])
        assert run_script(it, [], {"PYTHONPATH": more}, 60).returncode == 0
        assert "ModuleNotFoundError" in run_script(it, [], {"PYTHONPATH": path}, 60).log


def test_a_frameworks_own_modules_are_imported_for_those_that_ask_for_the_same_often(tmp_path):
    """By a process that is forked off the first one, with variables of its own."""
    (tmp_path / "own.py").write_text("import os; READ = os.environ['ASKED'], os.getpid()")
    text = """
import json, os, sys
print(json.dumps(["own" in sys.modules, os.environ["ASKED"], *__import__("own").READ, os.getpid()]))
print(os.listdir("/proc/self/fd"))
"""
    it, path = script(tmp_path, text), os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])

    def ran(asked):
        finished = run_script(it, [], {"ASKED": asked, "PYTHONPATH": path}, 60)
        assert finished.returncode == 0, finished.log
        found, files = finished.log.splitlines()
        assert files.count(",") == 3
        return json.loads(found)

    with preloaded(["colorsys"], ["own", "no_such_module"]):
        for turn in range(4):
            early, asked, read, by, mine = ran("one")
            assert (early, asked, read, by == mine) == (turn > 1, "one", "one", turn < 2)
        assert ran("two")[:3] == [False, "two", "two"]
        assert [ran("three")[0] for _ in range(3)] == [False, False, True]
        # A third one takes the place of that which is asked for most rarely.
        assert [ran("four")[0] for _ in range(4)] == [False, False, False, True]
        assert ran("one")[:3] == [True, "one", "one"]


def test_one_that_is_ended_as_soon_as_it_is_started_is_gone(tmp_path, monkeypatch, forked):
    """The group is there before anyone knows of it, however late the process has its turn."""
    turn = tmp_path / "turn.py"
    turn.write_text("import os, time; os.register_at_fork(after_in_child=lambda: time.sleep(0.5))")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    with preloaded(["turn"]) if forked else contextlib.nullcontext():
        process, *_log = start([sys.executable, str(script(tmp_path, "import time; time.sleep(60)"))])
        end_group(process)
        assert process.returncode == -15
        assert not living_of_group(process.pid)


def test_several_run_side_by_side(tmp_path, forked):
    text = """
import pathlib, sys, time
mine, other, code = sys.argv[1:]
pathlib.Path(mine).touch()
while not pathlib.Path(other).exists():
    time.sleep(0.01)
raise SystemExit(int(code))
"""
    (tmp_path / "nothing.py").write_text("")
    it, names = str(script(tmp_path, text)), [str(tmp_path / name) for name in ("a", "b", "c")]
    first, *_a = start([sys.executable, it, names[0], names[1], "3"])
    assert first.poll() is first.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    third, *_c = start([sys.executable, it, names[2], str(tmp_path / "none"), "0"])
    # One that runs from its start to its end meanwhile.
    assert run_script(tmp_path / "nothing.py", [], {}, 60).returncode == 0
    second, *_b = start([sys.executable, it, names[1], names[0], "5"])
    assert [second.wait(60), first.wait(60)] == [5, 3]
    assert [first.poll(), first.returncode, first.wait()] == [3, 3, 3]
    assert third.poll() is None
    end_group(third)
    assert third.returncode == -15


def test_a_group_is_ended_with_what_its_leader_leaves_behind(tmp_path, forked):
    text = """
import os, signal, time
if not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("begun", flush=True)
time.sleep(60)
"""
    process, printed, _log = start([sys.executable, str(script(tmp_path, text))])
    end = time.monotonic() + 60
    while "begun" not in printed.read_text():
        assert time.monotonic() < end, printed.read_text()
        time.sleep(0.05)
    assert len(living_of_group(process.pid)) == 2
    end_group(process)
    assert not living_of_group(process.pid)
    assert process.returncode == -15
