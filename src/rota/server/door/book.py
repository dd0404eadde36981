"""The connection book knows every open connection, and closes an idle one when another needs its place.

A connection is idle while no answer is under way: before its first request, while headers arrive, and between two
requests. A client without a right key is refused at once, so its connections are nearly always idle.
"""

from __future__ import annotations

from collections.abc import Callable

from rota.observe.connection_meters import Closure, ConnectionMeters, Refusal
from rota.server.door.limits import ConnectionLimits, group_of
from rota.server.door.log import ConnectionLog


class OpenConnection:
    """One entry of the book. Its connection says when it is busy, idle and gone."""

    __slots__ = ("_book", "address", "close", "is_trusted")

    def __init__(self, book: ConnectionBook, address: str, is_trusted: bool) -> None:
        self._book = book
        self.address = address
        self.is_trusted = is_trusted
        self.close: Callable[[], object] = lambda: None  # ends the connection at once

    def busy(self) -> None:
        self._book.set_idle(self, False)

    def idle(self) -> None:
        self._book.set_idle(self, True)

    def gone(self) -> None:
        """May be said more than once."""
        self._book.remove(self)

    def note(self, why: Closure) -> None:
        """The server closes it, and why."""
        self._book.log.closed(why)


class ConnectionBook:
    """For the event loop only."""

    def __init__(self, limits: ConnectionLimits, meters: ConnectionMeters) -> None:
        self._limits = limits
        self._meters = meters
        self._open: dict[str, set[OpenConnection]] = {}  # by address
        self._idle: dict[str, dict[OpenConnection, None]] = {}  # by address, the longest idle first
        self.log = ConnectionLog(meters, self._busiest)
        meters.most = limits.in_all

    def admit(self, host: str) -> OpenConnection | None:
        """Let a connection in, if need be in place of an idle one. None: it must be refused."""
        address, is_trusted = group_of(host), self._limits.is_trusted(host)
        if not is_trusted and len(self._open.get(address, ())) >= self._limits.per_address:
            if not self._close_idle(address):
                self.log.refused(Refusal.ADDRESS)
                return None
        elif self._meters.open >= self._limits.in_all and not self.make_room():
            self.log.refused(Refusal.ALL)
            return None
        entry = OpenConnection(self, address, is_trusted)
        self._open.setdefault(address, set()).add(entry)
        self._meters.open += 1
        self.set_idle(entry, True)
        return entry

    def make_room(self) -> bool:
        """Close the longest idle connection of the address that has most connections; a proxy's come last."""
        crowded = max(self._idle, key=self._crowd, default=None)
        return crowded is not None and self._close_idle(crowded)

    def set_idle(self, entry: OpenConnection, is_idle: bool) -> None:
        if entry not in self._open.get(entry.address, ()):
            return  # it has just been closed
        if is_idle:
            self._idle.setdefault(entry.address, {})[entry] = None
        elif idle := self._idle.get(entry.address):
            idle.pop(entry, None)
            if not idle:
                del self._idle[entry.address]

    def remove(self, entry: OpenConnection) -> None:
        entries = self._open.get(entry.address, set())
        if entry not in entries:
            return
        self.set_idle(entry, False)
        entries.discard(entry)
        self._meters.open -= 1
        if not entries:
            del self._open[entry.address]

    def _close_idle(self, address: str) -> bool:
        entry = next(iter(self._idle.get(address, ())), None)
        if entry is None:
            return False
        self.log.closed(Closure.MADE_ROOM)
        self.remove(entry)
        entry.close()
        return True

    def _crowd(self, address: str) -> tuple[bool, int]:
        longest_idle = next(iter(self._idle[address]))
        return not longest_idle.is_trusted, len(self._open[address])

    def _busiest(self) -> str:
        address = max(self._open, key=lambda one: len(self._open[one]), default=None)
        return f"{address} ({len(self._open[address])} open)" if address is not None else "none"
