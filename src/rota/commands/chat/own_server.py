"""A server of one's own serves the built-in model for as long as a chat lasts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rota.commands.server_call import CallError
from rota.runtime.lifeline import tied

# A signal asks it to end; its engine then has this long.
STOP_S = 15.0
_ADDRESS = re.compile(r" at (https?://\S+)$")


@contextmanager
def own_server() -> Iterator[str]:
    """The address of a server that ends with the block, or with this process. Raises CallError if it does not start."""
    words = [sys.executable, "-m", "rota", "serve", "--port", "0", "--quiet", "--drain-timeout", "0"]
    # In a session of its own: a ctrl-C in the terminal is for the answer, and not for the server.
    with subprocess.Popen(tied(words), stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            yield _address(server)
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := _ADDRESS.search(line.strip()):
            return found[1]
    raise CallError("The built-in model could not be started.")
