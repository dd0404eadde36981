"""Connections that nothing is done for give way, and slow clients do not hold the server."""

from __future__ import annotations

import json
import socket
import time

import pytest

from rota.observe.meters import Closure, ConnectionRefusal
from tests.server.doors import read_to_end, served
from tests.waiting import until

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
