"""A real server on a free port, for tests that want to see what a client sees."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from rota.server.door.connection import BoundedConnection
from tests.waiting import TIMEOUT_S, until

# What a client does not read soon stays with the server, and whoever writes has to wait.
SEND_BUFFER = 16 * 1024


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The application's URL while it runs in a thread, with connections as `rota serve` has them."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    config = uvicorn.Config(app, http=BoundedConnection, ws="none", log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert until(lambda: server.started or not thread.is_alive()), "the server has not started"
        assert thread.is_alive(), "the server ended before it served"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        listener.close()
        assert not thread.is_alive(), "the server has not stopped"
