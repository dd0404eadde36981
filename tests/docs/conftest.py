"""The server that the README starts, for examples that ask it."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import started
from tests.waiting import line_of

README_PORT = 30000


@pytest.fixture(scope="package")
def readme_url() -> Iterator[str]:
    """`rota serve` on the port that the README names; on another where that one is taken."""
    options = [] if is_free(README_PORT) else ["--port", "0"]
    command = [Path(sys.executable).with_name("rota"), "serve", "--quiet", *options]
    with started(command) as server:
        yield line_of(server, "Rota serves ").split()[-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
