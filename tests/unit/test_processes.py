"""What is told of a process that failed."""

from __future__ import annotations

from tests.integration.processes import end_of

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
