"""Strangers that come to a port: each tries to send a packet, and tells whether it was let in."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from rota.runtime.cluster.line import KeyPair
from rota.runtime.wire import Stop, encode
from tests.waiting import TIMEOUT_S

_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"  # what every socket of ZeroMQ says first

Intruder = Callable[[str, str], bool]


def without_keys(address: str, _: str) -> bool:
    return _is_let_in(address, None, "")


def with_another_key(address: str, port_key: str) -> bool:
    """It knows the key of the port, which is no secret, and has a pair of its own."""
    return with_keys(KeyPair.new())(address, port_key)


def with_another_key_of_the_port(address: str, _: str) -> bool:
    return with_another_key(address, KeyPair.new().public)


def with_keys(keys: KeyPair) -> Intruder:
    return lambda address, port_key: _is_let_in(address, keys, port_key)


def with_noise(address: str, _: str) -> bool:
    """It speaks another language, and is let in if it hears more than a greeting."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    heard = bytearray()
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as line, suppress(ConnectionResetError):
        line.sendall(b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n")
        while piece := line.recv(4096):
            heard += piece
    return len(heard) > len(_GREETING)


def with_a_giant(address: str, _: str) -> bool:
    """It begins a handshake with a frame of a gigabyte, and is let in if all of 128 MiB of it are taken."""
    mechanism = b"CURVE".ljust(20, b"\0")
    greeting = _GREETING + b"\x03\x00" + mechanism + bytes(32)
    long_command, size = b"\x06", (1 << 30).to_bytes(8, "big")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as line,
        suppress(ConnectionResetError, BrokenPipeError),
    ):
        line.sendall(greeting + long_command + size)
        for _piece in range(128):
            line.sendall(bytes(1 << 20))
        return True
    return False


def _is_let_in(address: str, keys: KeyPair | None, port_key: str) -> bool:
    with _stranger() as stranger:
        if keys:
            stranger.curve_publickey, stranger.curve_secretkey = keys.public.encode(), keys.secret
            stranger.curve_serverkey = port_key.encode()
        monitor = stranger.get_monitor_socket(_HANDSHAKE)
        stranger.connect(address)
        stranger.send(encode([Stop()]))
        assert monitor.poll(int(TIMEOUT_S * 1000.0)), "the port says neither yes nor no"
        return parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED


@contextmanager
def _stranger() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context.socket(zmq.PUSH)
    finally:
        context.destroy(linger=0)
