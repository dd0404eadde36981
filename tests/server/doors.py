"""A real server behind a door, for tests that look at connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from rota.core.config import ListenConfig
from rota.observe.meters import ConnectionMeters
from rota.runtime.client import EngineClient
from rota.server.door.door import Door, hold_port
from rota.server.listen import GracefulServer
from tests.waiting import TIMEOUT_S, until


@dataclass
class Served:
    """A server, its numbers, and an event that lets answers of /slow end."""

    port: int
    door: Door
    meters: ConnectionMeters
    may_end: threading.Event = field(default_factory=threading.Event)

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        """A connection that comes from this address of the machine."""
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S, source_address=(host, 0))

    def ask(self, path: str = "/hello", host: str = "127.0.0.1") -> bytes:
        """The whole answer to a request on a connection of its own."""
        with self.connect(host) as connection:
            connection.sendall(b"GET %s HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n" % path.encode())
            return read_to_end(connection)

    def ask_slowly(self, host: str = "127.0.0.1") -> socket.socket:
        """A connection whose answer has begun and does not end yet."""
        connection = self.connect(host)
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n")
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 OK")
        while b"begun" not in received:  # head and body may come apart
            received += connection.recv(65536)
        return connection


def read_to_end(connection: socket.socket) -> bytes:
    """What a server says until it closes the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


@contextmanager
def served(**options: object) -> Iterator[Served]:
    """A server with these options of `rota serve`."""
    door = Door(ListenConfig(**options))  # type: ignore[arg-type]
    listener = hold_port("127.0.0.1", 0)
    listener.listen(512)
    one = Served(listener.getsockname()[1], door, ConnectionMeters())
    app = _app(one)
    server = GracefulServer(app, cast(EngineClient, None), door, 0.0, print)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert until(lambda: server.started), "the server has not started"
        yield one
    finally:
        one.may_end.set()
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server has not stopped"


def _app(one: Served) -> FastAPI:
    app = FastAPI()
    app.state.connections = one.meters

    @app.get("/hello")
    @app.post("/deaf")
    async def hello() -> str:
        return "hello"

    @app.post("/length")
    async def length(http: Request) -> int:
        return len(await http.body())

    @app.get("/slow")
    async def slow() -> StreamingResponse:
        async def letters() -> AsyncIterator[bytes]:
            yield b"begun"
            await asyncio.to_thread(one.may_end.wait, TIMEOUT_S)
            yield b"ended"

        return StreamingResponse(letters())

    return app
