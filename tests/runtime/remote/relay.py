"""A relay stands between two machines: it keeps every byte, and can cut the line or let nothing through."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
