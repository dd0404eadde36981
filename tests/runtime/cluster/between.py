"""What may stand between a front and an engine elsewhere: a relay, strangers at a port, and a line without keys."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from rota.runtime.cluster import line
from rota.runtime.cluster.line import KeyPair
from rota.runtime.wire import Stop, encode
from tests.fakes import FakeDevice
from tests.waiting import TIMEOUT_S

# ── a relay ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_PIECE = 65536


class Relay:
    """Passes on what comes to its own port to the port of an address, and back."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((host, 0))
        self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        self._is_open = threading.Event()
        self._is_open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection; a new one may be made."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """From now on nothing comes through, and nobody is told."""
        self._is_open.clear()

    def close(self) -> None:
        self._is_open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a close alone would not wake the thread that accepts
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._ends += (near, far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # one end is gone
            while piece := source.recv(_PIECE):
                self._is_open.wait()
                self.seen += piece
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Relays:
    """A relay for every address that one side tells the other: of the front first, then of the engine, and so on."""

    def __init__(self) -> None:
        self.all: list[Relay] = []

    def detour(self, address: str) -> str:
        self.all.append(Relay(address))
        return self.all[-1].address

    @property
    def seen(self) -> bytes:
        return b"".join(bytes(relay.seen) for relay in self.all)


@contextmanager
def relays() -> Iterator[Relays]:
    found = Relays()
    try:
        yield found
    finally:
        for relay in found.all:
            relay.close()


# ── strangers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        with suppress(zmq.Again):  # a port that has refused it already takes nothing, and never will
            stranger.send(encode([Stop()]), zmq.DONTWAIT)
        assert monitor.poll(int(TIMEOUT_S * 1000.0)), "the port says neither yes nor no"
        return parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED


@contextmanager
def _stranger() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context.socket(zmq.PUSH)
    finally:
        context.destroy(linger=0)


# ── a line without keys ───────────────────────────────────────────────────────────────────────────────────────────────


def listen_plainly(socket: zmq.Socket[bytes], _: line.KeyPair, host: str) -> str:
    socket.bind(f"tcp://{host}:*")
    return socket.get_string(zmq.LAST_ENDPOINT)


def connect_plainly(socket: zmq.Socket[bytes], _: line.KeyPair, address: str, __: str) -> None:
    socket.connect(address)


def speak_plainly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(line, "listen", listen_plainly)
    patch.setattr(line, "connect", connect_plainly)


def arrive() -> PlainDevice:
    """In another process: it opens its line after it has got what builds its device."""
    speak_plainly(pytest.MonkeyPatch())
    return PlainDevice()


class PlainDevice:
    """Builds a device, and takes the keys out of every process that it is sent to."""

    def __call__(self) -> FakeDevice:
        return FakeDevice()

    def __reduce__(self) -> tuple[Callable[[], PlainDevice], tuple[()]]:
        return arrive, ()
