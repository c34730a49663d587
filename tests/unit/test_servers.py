"""Servers for tests: whether they are forked or started, and what one says that ends under a test."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import ClassVar

import pytest

from tests.integration.preloaded import preloaded
from tests.integration.processes import living_of_group
from tests.integration.server import Server, ServerFailed

# Healthy once, and gone at the next request.
ONCE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health":
            print("out of luck", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Ending(Server):
    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", ONCE, str(self.port)]

    def startup_report(self) -> list[str]:
        return []


def test_an_error_while_the_server_ends_has_the_end_of_its_log():
    with pytest.raises(ConnectionError) as error, Ending("model") as server:
        server.get("/metrics")
    (note,) = error.value.__notes__
    assert "exit code 3" in note
    assert "out of luck" in note


def test_an_error_beside_a_server_that_runs_has_none():
    with pytest.raises(AssertionError) as error, Ending("model"):
        raise AssertionError
    assert not hasattr(error.value, "__notes__")


# Has a child that does not end by itself. With an exit code, it ends at once.
SERVES = """
import http.server, os, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["ASKED"].encode())

if __name__ == "__main__":
    print("forked" if "colorsys" in sys.modules else "started", flush=True)
    if not os.fork():
        time.sleep(600)
    if sys.argv[2:]:
        sys.exit(int(sys.argv[2]))
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Serving(Server):
    """With a script as its model."""

    defaults: ClassVar[Mapping[str, str]] = {"ASKED": "this"}

    @property
    def command(self) -> list[str]:
        return [sys.executable, self.model, str(self.port), *self.flags]

    def startup_report(self) -> list[str]:
        return []


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SERVES)
    return path


@pytest.mark.parametrize(
    ("within", "by_command", "way"),
    [(False, False, "started"), (False, True, "started"), (True, False, "forked"), (True, True, "started")],
)
def test_one_is_forked_where_modules_are_preloaded_unless_its_command_is_asked_for(script, within, by_command, way):
    with preloaded(["colorsys"]) if within else nullcontext():
        with Serving(script, by_command=by_command) as server:
            assert server.log == f"{way}\n"
            assert server.get("/") == "this"
            assert server.returncode is None
            assert len(living_of_group(server.leader)) == 2
        assert server.returncode == -15
        assert not living_of_group(server.leader)


@pytest.mark.parametrize("by_command", [False, True])
def test_one_that_ends_before_it_is_ready_leaves_nothing(script, by_command):
    with preloaded(["colorsys"]):
        server = Serving(script, "3", by_command=by_command)
        with pytest.raises(ServerFailed, match="ended with exit code 3") as failure, server:
            pass
    assert (failure.value.returncode, failure.value.log) == (3, "started\n" if by_command else "forked\n")
    assert not living_of_group(server.leader)
