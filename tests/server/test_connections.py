"""Connections that say too much, or nothing, are closed; those that wait for an answer are not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from rota.server.door.connection import MAX_HEAD_BYTES, BoundedConnection
from tests.waiting import TIMEOUT_S

GET = b"GET / HTTP/1.1\r\nHost: here\r\n"
Connect = Callable[..., socket.socket]


class Unhurried(BoundedConnection):
    """Waits longer than a busy machine holds up a client."""

    head_s = read_s = TIMEOUT_S


class Hasty(Unhurried):
    """Waits half a second for headers, and for a client to read."""

    head_s = read_s = 0.5


class Watchful(Unhurried):
    """Waits for a client that reads nothing, longer than a busy machine holds one up, and not for the whole test."""

    read_s = 6.0


class Answering:
    """Answers when it may, with as many megabytes as it is asked for."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer, self.has_answered = threading.Event(), threading.Event(), threading.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.is_asked.set()
        await asyncio.to_thread(self.may_answer.wait, TIMEOUT_S)
        request = Request(scope, receive)
        await request.body()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(int(request.headers.get("x-megabytes", 0))):
            await send({"type": "http.response.body", "body": b"." * 2**20, "more_body": True})
        await send({"type": "http.response.body", "body": b"well"})
        self.has_answered.set()


@pytest.fixture
def app() -> Answering:
    return Answering()


@pytest.fixture
def connect(app: Answering) -> Iterator[Connect]:
    """Starts a server that has such connections; a client is there already, with the beginning of what it says."""
    with ExitStack() as stack:

        def begin(kind: type[BoundedConnection], beginning: bytes = b"") -> socket.socket:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=TIMEOUT_S))
            client.sendall(beginning)
            stack.enter_context(served(app, kind, listener))
            return client

        yield begin


@contextmanager
def served(app: Answering, kind: type[BoundedConnection], listener: socket.socket) -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, http=kind, ws="none", lifespan="off", log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield
    finally:
        app.may_answer.set()
        server.should_exit = True
        thread.join()


def receive(connection: socket.socket) -> bytes:
    """What comes next from a server that has not given this client up."""
    data = connection.recv(65536)
    assert data, "the server closed the connection"
    return data


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


@pytest.mark.parametrize("beginning", [b"", GET, GET + b"\r\n" + GET])
def test_a_connection_whose_headers_do_not_come_is_closed(connect, beginning):
    received = read_to_end(connect(Hasty, beginning))

    assert received.count(b"HTTP/1.1 200 OK") == beginning.count(b"\r\n\r\n")


def test_headers_without_end_are_refused(connect):
    line = b"X-More: " + b"a" * 1000 + b"\r\n"
    client = connect(Unhurried, GET)
    try:
        for _ in range(10 * MAX_HEAD_BYTES // len(line)):
            client.sendall(line)
        received = read_to_end(client)
    except ConnectionError:
        return  # it was closed while more was on its way

    assert b"400 Bad Request" in received


def test_a_body_that_comes_with_its_headers_is_not_counted_as_theirs(connect):
    """All of it is there before the first byte is read."""
    body = b"a" * (MAX_HEAD_BYTES + 1000)
    client = connect(Unhurried, GET + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    assert read_to_end(client).startswith(b"HTTP/1.1 200 OK")


def test_whoever_waits_for_an_answer_is_left_alone_whatever_line_follows_the_request(connect, app):
    app.may_answer.clear()
    client = connect(Hasty, GET + b"\r\n")
    assert app.is_asked.wait(TIMEOUT_S)
    client.sendall(b"\r\n")
    # Twice as long as a head may take.
    threading.Timer(2 * Hasty.head_s, app.may_answer.set).start()

    assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_never_reads_its_answer_is_given_up(connect, app):
    client = connect(Hasty, GET + b"X-Megabytes: 50\r\n\r\n")

    assert app.has_answered.wait(TIMEOUT_S), "whoever writes waits until the client is given up"
    assert not read_to_end(client).endswith(b"well\r\n0\r\n\r\n")


def test_a_client_that_reads_slowly_is_not_given_up(connect):
    client = connect(Watchful, GET + b"X-Megabytes: 50\r\nConnection: close\r\n\r\n")
    received = 0
    for pause in range(1, 10):
        # Time is what is tested: in all, longer than a client that reads nothing is waited for.
        time.sleep(0.7)
        while received < pause * 5_000_000:
            received += len(receive(client))
    rest = read_to_end(client)

    assert received + len(rest) > 50 * 2**20
    assert rest.endswith(b"well\r\n0\r\n\r\n")


def test_a_connection_serves_one_request_after_the_other(connect):
    client = connect(Unhurried)
    for body in (b"a" * 3 * MAX_HEAD_BYTES, b"", b"b"):
        client.sendall(GET + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = b""
        while b"well" not in received:
            received += receive(client)
        assert received.startswith(b"HTTP/1.1 200 OK")
