"""How processes are ended, and what is told of one that failed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.integration.processes import end_group, end_of, living_of_group, start_group, temporary_log

TRACEBACK = "(Worker) Traceback (most recent call last):"


def test_the_end_of_a_log_is_told():
    assert end_of("a\nb\nc", 2) == "b\nc"
    assert end_of("a", 2) == "a"
    assert end_of("", 2) == ""


def test_what_failed_first_is_told_before_the_end():
    log = "\n".join(["start", TRACEBACK, "the cause", *"abc", TRACEBACK, "it has failed"])
    assert end_of(log, 2) == f"{TRACEBACK}\nthe cause\n...\n{TRACEBACK}\nit has failed"
    assert end_of(log, 6) == "\n".join([TRACEBACK, "the cause", *"abc", TRACEBACK, "it has failed"])
    assert end_of(log, 7) == end_of(log, 6)


# A leader that ends when it is asked to, and leaves behind a process that does not and has much memory to give back.
STUBBORN = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); x = b'x' * (1 << 29); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""  # noqa: E501


def test_none_of_a_group_lives_when_it_has_been_ended():
    with temporary_log() as log:
        leader = start_group([sys.executable, "-c", STUBBORN], os.environ, log)
        # By its name: the file's offset is shared with the processes that write to it.
        while "up" not in Path(log.name).read_text():
            time.sleep(0.05)
        assert len(living_of_group(leader.pid)) == 2
        end_group(leader)
        assert living_of_group(leader.pid) == []
