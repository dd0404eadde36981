"""A guarded line joins front and engine over TCP: each side has a port and a key, and lets in the other alone."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from rota.core.errors import EngineDiedError
from rota.runtime.remote import keys
from rota.runtime.remote.guard import Guard
from rota.runtime.wire import open_socket


class GuardedLine:
    """One side. Both are alike: an inbox at a port of its own, and an outlet that connects to the other's port.

    A line that breaks is not used again, though ZeroMQ would connect anew: what was on its way may be lost, and
    neither side would know. `on_lost` is called by a thread of the line.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], on_lost: Callable[[], None], linger_s: float = 0.0
    ) -> None:
        self._keys = keys.KeyPair.new()
        self.inbox = open_socket(context, zmq.PULL)
        self.outlet = open_socket(context, zmq.PUSH, linger_s)
        self._guard = Guard(context, self.inbox, self.outlet, on_lost)

    @property
    def public_key(self) -> str:
        return self._keys.public

    def listen(self, host: str) -> str:
        """Take a free port, and return its address; no peer is let in yet."""
        try:
            self._guard.log.port = keys.listen(self.inbox, self._keys, host)
        except zmq.ZMQError as error:
            raise EngineDiedError(f"No port could be taken at {host}: {error}.") from error
        return self._guard.log.port

    def expect(self, their_key: str) -> None:
        """Let the other side in."""
        self._guard.expect(their_key)

    def wait_for_guest(self, timeout_s: float) -> bool:
        """Whether the other side has connected to this side's port in time."""
        return self._guard.wait_for_guest(timeout_s)

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Whether the other side has let this one in in time."""
        return self._guard.wait_for_line(timeout_s)

    def connect(self, address: str, their_key: str) -> None:
        """Records that are sent from now on reach the other side; a send before would block."""
        keys.connect(self.outlet, self._keys, address, their_key)

    def close(self) -> None:
        self._guard.close()
        self.outlet.close()
        self.inbox.close()
