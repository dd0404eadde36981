"""Connections that say too much or nothing, and those that nothing is done for, give way to others."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from rota.core.config import ListenConfig
from rota.core.errors import ConfigError
from rota.observe.meters import Closure, ConnectionMeters, ConnectionRefusal
from rota.server.door.book import (
    ConnectionBook,
    ConnectionLimits,
    ConnectionLog,
    few_connections,
    find_limits,
    group_of,
)
from rota.server.door.connection import MAX_HEAD_BYTES, BoundedConnection
from tests.processes import run_program
from tests.server.doors import read_to_end, served
from tests.waiting import TIMEOUT_S, until

# ── how many a server takes ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_limit_of_open_files_leaves_a_reserve_and_half_is_for_one_address():
    limits = find_limits(ListenConfig(), open_files=1064)

    assert (limits.in_all, limits.per_address) == (1000, 500)


def test_without_a_limit_of_open_files_there_is_one_of_connections():
    assert find_limits(ListenConfig(), open_files=2**20).in_all == 16_384


def test_more_connections_than_open_files_are_refused_with_the_command_that_helps():
    with pytest.raises(ConfigError, match=r"may open 200 files.*ulimit -n 1064"):
        find_limits(ListenConfig(max_connections=1000), open_files=200)


def test_few_open_files_are_said_at_the_start_unless_the_operator_chose_the_number():
    for config, advice in ((ListenConfig(), "at most 136 connections"), (ListenConfig(max_connections=100), "")):
        assert advice in few_connections(config, find_limits(config, 200), 200)
    assert not few_connections(ListenConfig(), find_limits(ListenConfig(), 1024), 1024)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_connections": 0}, "max_connections must be at least 1"),
        ({"head_timeout": 0.0}, "head_timeout must be a finite number above 0"),
        ({"trusted_proxies": ("proxy.local",)}, "trusted_proxies has 'proxy.local'; give addresses or networks"),
        ({"ssl_keyfile": "key"}, "ssl_keyfile is given without ssl_certfile"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        ListenConfig(**options)


def test_addresses_of_one_ipv6_network_count_as_one():
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:2%eth0") != group_of("2001:db8:0:1::1")
    assert group_of("::ffff:10.0.0.7") == group_of("10.0.0.7") != group_of("10.0.0.8")


def test_a_busy_connection_that_becomes_idle_is_the_last_to_give_way():
    async def run() -> list[str]:
        book = ConnectionBook(ConnectionLimits(in_all=2, per_address=2), ConnectionMeters())
        closed: list[str] = []
        first, second = book.admit("10.0.0.1"), book.admit("10.0.0.1")
        first.close, second.close = (lambda: closed.append("first")), (lambda: closed.append("second"))
        first.busy()
        first.idle()
        assert book.admit("10.0.0.2") is not None
        second.idle()  # it does not know yet that it was closed
        second.gone()
        return closed

    assert asyncio.run(run()) == ["second"]


def test_a_minute_has_one_line_with_all_counts(caplog, monkeypatch):
    monkeypatch.setattr("rota.server.door.book.GATHER_S", 0.0)
    said = asyncio.Event()
    caplog.handler.addFilter(lambda _: said.set() or True)

    async def run() -> None:
        log = ConnectionLog(ConnectionMeters(open=7, most=8), lambda: "10.0.0.1 (5 open)")
        for _ in range(3):
            log.refused(ConnectionRefusal.ADDRESS)
        log.closed(Closure.SLOW_BODY)
        await said.wait()
        log.refused(ConnectionRefusal.ALL)
        await asyncio.sleep(0.05)  # a second line would come at once
        assert len(caplog.records) == 1
        log.write()

    with caplog.at_level(logging.WARNING, "rota.server"):
        asyncio.run(run())

    always = {"open": 7, "limit": 8, "busiest": "10.0.0.1 (5 open)"}
    assert [record.fields for record in caplog.records] == [
        {"refused_address": 3, "slow_body": 1} | always,
        {"refused_all": 1} | always,
    ]


@pytest.mark.parametrize(("hard", "enough", "limit"), [(400, 300, 300), (400, 1000, 400), (400, 100, 200)])
def test_a_process_raises_its_limit_of_open_files_as_far_as_it_is_of_use(hard, enough, limit):
    script = f"""
import resource
from rota.server.door.book import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))
print(raise_open_files({enough}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    assert run_program([sys.executable, "-c", script]).stdout.split() == [str(limit)] * 2


# ── what one may say ──────────────────────────────────────────────────────────────────────────────────────────────────

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
            stack.enter_context(answering(app, kind, listener))
            return client

        yield begin


@contextmanager
def answering(app: Answering, kind: type[BoundedConnection], listener: socket.socket) -> Iterator[None]:
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


# ── a server behind its door ──────────────────────────────────────────────────────────────────────────────────────────

POST = b"POST %s HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"a" * 100_000)
        time.sleep(0.01)  # not more often than it takes: a server reads it all


def code_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def test_an_idle_connection_gives_way_to_a_new_one_and_the_longest_idle_goes_first():
    with served(max_connections=3, max_connections_per_address=3) as server:
        idle = [server.connect() for _ in range(3)]
        assert until(lambda: server.meters.open == 3)

        assert server.ask(host="127.0.0.2").startswith(b"HTTP/1.1 200 OK")
        assert read_to_end(idle[0]) == b""
        idle[1].sendall(b"GET /hello HTTP/1.1\r\nHost: here\r\n\r\n")
        assert idle[1].recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert server.meters.closed[Closure.MADE_ROOM] == 1
        for connection in idle:
            connection.close()


def test_the_address_with_most_connections_makes_room():
    with served(max_connections=4, max_connections_per_address=3) as server:
        first = server.connect("127.0.0.2")
        assert until(lambda: server.meters.open == 1)
        many = [server.connect("127.0.0.1") for _ in range(3)]
        assert until(lambda: server.meters.open == 4)

        assert server.ask(host="127.0.0.3").startswith(b"HTTP/1.1 200 OK")
        assert read_to_end(many[0]) == b""
        first.sendall(b"GET /hello HTTP/1.1\r\nHost: here\r\n\r\n")
        assert first.recv(65536).startswith(b"HTTP/1.1 200 OK")
        for connection in (first, *many):
            connection.close()


def test_a_busy_connection_never_gives_way_and_the_new_one_hears_why():
    with served(max_connections=2, max_connections_per_address=2) as server:
        busy = [server.ask_slowly(host) for host in ("127.0.0.1", "127.0.0.2")]

        refused = server.ask(host="127.0.0.3")

        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 1\r\n" in refused
        assert code_of(refused) == "too_many_connections"
        assert server.meters.refused[ConnectionRefusal.ALL] == 1
        server.may_end.set()
        for connection in busy:
            assert b"ended" in connection.recv(65536)
            connection.close()


def test_one_address_has_its_share_and_another_is_served():
    with served(max_connections=10, max_connections_per_address=1) as server, server.ask_slowly():
        assert server.ask().startswith(b"HTTP/1.1 503 ")
        assert server.ask(host="127.0.0.2").startswith(b"HTTP/1.1 200 OK")
        assert server.meters.refused[ConnectionRefusal.ADDRESS] == 1


def test_a_trusted_proxy_has_no_share():
    options = {"max_connections": 10, "max_connections_per_address": 1, "trusted_proxies": ("127.0.0.0/31",)}
    with served(**options) as server, server.ask_slowly():
        assert server.ask().startswith(b"HTTP/1.1 200 OK")


def test_the_idle_connections_of_a_trusted_proxy_give_way_last():
    with served(max_connections=3, trusted_proxies=("127.0.0.1",)) as server:
        proxied = [server.connect() for _ in range(2)]
        assert until(lambda: server.meters.open == 2)
        with server.connect("127.0.0.2") as other:
            assert until(lambda: server.meters.open == 3)

            assert server.ask(host="127.0.0.3").startswith(b"HTTP/1.1 200 OK")
            assert read_to_end(other) == b""
        for connection in proxied:
            connection.close()


def test_a_connection_that_ended_frees_its_place():
    with served(max_connections=1) as server:
        for _ in range(5):
            assert server.ask().startswith(b"HTTP/1.1 200 OK")
        assert until(lambda: server.meters.open == 0)
        assert server.meters.refused[ConnectionRefusal.ALL] == 0


def test_a_body_that_does_not_come_is_answered_with_408():
    with served(body_timeout=0.3) as server, server.connect() as connection:
        connection.sendall(POST % (b"/length", 1000) + b"a" * 500)

        answer = read_to_end(connection)

        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert code_of(answer) == "body_too_slow"
        assert server.meters.closed[Closure.SLOW_BODY] == 1


def test_a_large_body_that_keeps_coming_may_take_longer():
    with served(body_timeout=0.5) as server, server.connect() as connection:
        connection.sendall(POST % (b"/length", 300_000) + b"a" * 100_000)  # which is worth ten seconds
        for _ in range(2):
            time.sleep(0.6)  # time is what is tested: each is longer than the deadline
            connection.sendall(b"a" * 100_000)

        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_was_answered_cannot_go_on_with_its_body_for_ever():
    with served(body_timeout=2.0) as server, server.connect() as connection:
        connection.sendall(POST % (b"/deaf", 10**12))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")

        with pytest.raises(ConnectionError):
            send_for_ever(connection)

        assert server.meters.closed[Closure.SLOW_BODY] == 1


def test_headers_that_do_not_come_are_counted():
    with served(head_timeout=0.3) as server, server.connect() as connection:
        assert read_to_end(connection) == b""
        assert server.meters.closed[Closure.SLOW_HEAD] == 1
