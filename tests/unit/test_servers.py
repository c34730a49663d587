"""Servers for tests: one that ends under a test says why."""

from __future__ import annotations

import sys

import pytest

from tests.integration.server import Server

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
