"""The scores of checkpoints by lm-eval, without servers and without lm-eval."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from benchmarks import _accuracy
from tests.integration.server import ServerFailed

LOG = """INFO 11-21 17:00:00 [core.py:1] starts
(EngineCore pid=7) ERROR 11-21 17:00:01 [core.py:2]     raise ValueError(
(EngineCore pid=7) ERROR 11-21 17:00:01 [core.py:2] ValueError: Unknown format.
RuntimeError: Engine core failed. See the cause above.
WARNING 11-21 17:00:01 [files.py:3] This may come with `OSError: [Errno 24] Too many open files`.
bye
"""


class Served:
    """Stands in for a server of ``name``; vLLM's own of "packed" does not start."""

    def __init__(self, name, checkpoint):
        self.name, self.checkpoint = name, checkpoint

    def __enter__(self):
        if (self.name, self.checkpoint.name) == ("native", "packed"):
            raise ServerFailed("It ended", LOG, 1)
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def compare(monkeypatch, capsys):
    """The command's output for some arguments."""
    monkeypatch.setattr(_accuracy, "LM_EVAL", sys.executable)
    monkeypatch.setattr(_accuracy, "score", lambda server, count: 1.0 if server.name == "native" else 0.998)

    def run(*arguments, serve=Served):
        monkeypatch.setattr(sys, "argv", ["accuracy", *map(str, arguments)])
        _accuracy.compare("", serve)
        return [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]

    return run


def folder(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    return tmp_path


def test_families_are_scored_where_no_folder_is_named(compare):
    lines = compare("--families", "qwen3", "--concurrency", "16")
    assert lines == [["qwen3", "native", "concurrency 16: 100.0%"], ["qwen3", "atom", "concurrency 16: 99.8%"]]


def test_copies_are_scored_and_what_cannot_be_served_is_said(compare, tmp_path):
    lines = compare("--copies", folder(tmp_path, "packed", "blocks"), "--concurrency", "1")
    assert lines == [
        ["blocks", "native", "concurrency 1: 100.0%"],
        ["blocks", "atom", "concurrency 1: 99.8%"],
        ["packed", "native", "cannot serve it: ValueError: Unknown format."],
        ["packed", "atom", "concurrency 1: 99.8%"],
    ]


def test_atom_that_cannot_serve_one_is_an_error(compare, tmp_path):
    with pytest.raises(ServerFailed):
        compare("--copies", folder(tmp_path, "packed"), serve=lambda name, checkpoint: Served("native", checkpoint))


def test_an_empty_folder_is_refused(compare, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare("--copies", tmp_path)
    assert "holds no folder with a config.json" in capsys.readouterr().err


def test_a_command_that_is_not_there_is_said(compare, monkeypatch, capsys):
    monkeypatch.setattr(_accuracy, "LM_EVAL", "no_such_command")
    with pytest.raises(SystemExit):
        compare("--families", "qwen3")
    assert "no command no_such_command: pip install 'lm-eval[api]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "cause"),
    [(LOG, "ValueError: Unknown format."), ("fine", "TypeError: no such task")],
    ids=["server", "client"],
)
def test_a_client_that_fails_says_the_servers_error_or_its_own(log, cause, monkeypatch, tmp_path):
    client = tmp_path / "client"
    client.write_text("#!/bin/sh\necho 'TypeError: no such task' >&2\nexit 1\n")
    client.chmod(0o755)
    monkeypatch.setattr(_accuracy, "LM_EVAL", str(client))
    with pytest.raises(ServerFailed, match=r"exit code 1: TypeError: no such task\.") as failed:
        _accuracy.score(SimpleNamespace(model="it", url="http://it", log=log), 1)
    assert _accuracy.last_error(failed.value.log) == cause


def test_an_error_may_say_nothing():
    assert _accuracy.last_error("ERROR 11-21 17:00:01 [core.py:2] AssertionError") == "AssertionError"


def test_a_log_may_name_no_error():
    assert _accuracy.last_error("killed") == "its log names no error"
