"""Strangers are peers that a port does not let in: found in a socket's events, and told in few lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import zmq

LOG = logging.getLogger("rota.engine")

# Between two lines; a port scan must not fill a disk.
QUIET_S = 60.0

_WHY = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "It has no key.",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "It does not know the key of this port.",
}
_LEFT = "It left before it had shown a key."
_NOISE = "It does not speak the language of this port."


class Visitors:
    """Reads the events of a bound socket: who came, whether the guest is in, and who was turned away."""

    EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )

    def __init__(self) -> None:
        self._connected: set[int] = set()
        # A success does not say of which connection: it is one of those that were there.
        self._may_be_guest: set[int] = set()
        self._was_told = False

    def note(self, event: int, value: int) -> str:
        """Why a stranger was turned away; empty if none was. One that fails is told of when it fails or leaves."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._connected.add(value)
                self._may_be_guest.discard(value)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._may_be_guest |= self._connected
            case zmq.EVENT_DISCONNECTED:
                return self._leave(value)
            case _:
                self._was_told = True
                return _why(event, value)
        return ""

    def _leave(self, connection: int) -> str:
        is_known = self._was_told or connection in self._may_be_guest
        self._was_told = False
        self._connected.discard(connection)
        self._may_be_guest.discard(connection)
        return "" if is_known else _NOISE


def _why(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "Its key is not the one that is expected."
    return _WHY.get(value, _LEFT)


class StrangerLog:
    """One line for the first stranger, and at most one a minute for all that follow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = ""
        self._clock = clock
        self._said_at = -math.inf
        self._more = 0

    @property
    def left_s(self) -> float:
        """How long until there is something to say, if no stranger comes."""
        return max(0.0, self._said_at + QUIET_S - self._clock()) if self._more else math.inf

    def turned_away(self, why: str) -> None:
        if self._clock() - self._said_at < QUIET_S:
            self._more += 1
            return
        self.say_rest()
        LOG.warning("A stranger at %s was turned away. %s", self.port, why)
        self._said_at = self._clock()

    def say_rest(self) -> None:
        """Tell how many came since the last line, if there were any."""
        if self._more:
            LOG.warning("Strangers at %s were turned away %d more times.", self.port, self._more)
            self._said_at, self._more = self._clock(), 0
