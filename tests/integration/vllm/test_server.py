"""The helper that starts servers says clearly when one does not start, and leaves no process behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.integration.server import ServerFailed, VllmServer

pytestmark = pytest.mark.vllm


def is_running(argument: str) -> bool:
    """Whether any process has `argument` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def test_a_server_that_ends_shows_its_log(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ServerFailed, match="ended with exit code") as error, VllmServer(tmp_path):
        pass
    assert error.value.returncode
    assert "config.json" in error.value.log


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    server = VllmServer(tmp_path, deadline=1.0)
    with pytest.raises(ServerFailed, match="not ready after 1 s"), server:
        pass
    assert not is_running(str(server.port))
