"""The helper that starts servers says clearly when one does not start, and leaves no process behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.integration.processes import living_of_group
from tests.integration.server import ServerFailed, VllmServer

pytestmark = pytest.mark.vllm


def is_running(argument: str) -> bool:
    """Whether any process has `argument` in its command line, where a forked one has nothing of its own."""
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


@pytest.mark.parametrize("by_command", [True, False], ids=["by its command", "forked"])
def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path, by_command):
    # A forked one has all of vLLM, and finds within a second that there is no model.
    server = VllmServer(tmp_path, deadline=0.0, by_command=by_command)
    with pytest.raises(ServerFailed, match="not ready after 0 s"), server:
        pass
    assert server.returncode is not None
    assert not living_of_group(server.leader)
    assert not is_running(str(server.port))
