"""A line is the pair of sockets between an engine's process and its server, as the engine holds it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import zmq

from rota.runtime.patience import LINGER_S
from rota.runtime.wire import open_socket

# Two processes on one machine connect in milliseconds; a wait for that must still end.
_MEET_S = 10.0


class Line(Protocol):
    """An open line: messages come in at the inbox, and records leave by the outlet."""

    @property
    def inbox(self) -> zmq.Socket[bytes]: ...

    @property
    def outlet(self) -> zmq.Socket[bytes]: ...

    def close(self) -> None: ...


class Endpoints(Protocol):
    """Where the two processes meet. It travels to the engine's process, which opens its line there."""

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> Line: ...

    def remove(self) -> None:
        """Leave nothing behind on a disk."""
        ...


@dataclass(frozen=True, slots=True)
class LocalLine:
    inbox: zmq.Socket[bytes]
    outlet: zmq.Socket[bytes]

    def close(self) -> None:
        self.outlet.close()
        self.inbox.close()


@dataclass(frozen=True, slots=True)
class LocalEndpoints:
    """The addresses of the two sockets between processes of one machine, in a folder of their own."""

    folder: str

    @property
    def messages(self) -> str:
        return f"ipc://{self.folder}/messages"

    @property
    def events(self) -> str:
        return f"ipc://{self.folder}/events"

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> Line:
        line = LocalLine(open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH, LINGER_S))
        with _handshake(line.inbox) as inbox_monitor, _handshake(line.outlet) as outlet_monitor:
            line.inbox.bind(self.messages)
            line.outlet.connect(self.events)
            if all(monitor.poll(int(_MEET_S * 1000.0)) for monitor in (inbox_monitor, outlet_monitor)):
                self.remove()  # connected sockets need no path, and now no death can leave one behind
        return line

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _handshake(socket: zmq.Socket[bytes]) -> Iterator[zmq.Socket[bytes]]:
    """A monitor that becomes readable once the socket is connected to its peer."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    yield monitor
    socket.disable_monitor()
    monitor.close()
