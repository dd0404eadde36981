"""The connection book knows every open connection, and closes an idle one when another needs its place.

A connection is idle while no answer is under way: before its first request, while headers arrive, and between two
requests. A client without a right key is refused at once, so its connections are nearly always idle.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rota.core.config import ListenConfig
from rota.core.errors import ConfigError
from rota.observe.meters import Closure, ConnectionMeters, ConnectionRefusal

# ── open files ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The limit of open files bounds connections, because every socket is an open file.

# Where there is no limit, or none that is known.
PLENTY = 2**20
# For what is open besides connections: the sockets to the engine, logs, folders of models, threads' own files.
RESERVE = 64
# A limit is raised no further than is of use: some programs walk through all files that they could have open.
ENOUGH = 2**16


def raise_open_files(enough: int = ENOUGH) -> int:
    """Raise the limit of this process until it is enough, or as far as it may be raised, and return the limit."""
    if sys.platform == "win32":
        return PLENTY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft == resource.RLIM_INFINITY or soft >= goal:
        return PLENTY if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not allow
        return soft
    return goal


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Connection limits say how many connections may be open, in all and for one address.

# More than requests can run or wait. A connection takes some 20 kB, and with TLS some 100 kB.
MOST_BY_DEFAULT = 16_384
# With fewer files than the reserve some connections are still taken: not all of the reserve is always used.
FEWEST = 16
# A limit of open files that leaves fewer connections than this is worth a sentence at the start.
FEW = 256

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    in_all: int
    per_address: int
    trusted: tuple[Network, ...] = ()

    def is_trusted(self, host: str) -> bool:
        """Whether an address is a proxy's, which has many clients behind it."""
        return bool(self.trusted) and any(_address(host) in network for network in self.trusted)


def find_limits(config: ListenConfig, open_files: int) -> ConnectionLimits:
    """The limits of a process that may open so many files. Raises ConfigError if it may not open enough."""
    most = max(open_files - RESERVE, FEWEST)
    in_all = min(most, MOST_BY_DEFAULT) if config.max_connections == "auto" else config.max_connections
    if in_all > most:
        raise ConfigError(
            f"max_connections is {in_all}, but this process may open {open_files} files, and {RESERVE} of them are for "
            f"other things; raise the limit (ulimit -n {in_all + RESERVE}), or lower max_connections."
        )
    share = config.max_connections_per_address
    return ConnectionLimits(
        in_all=in_all,
        per_address=max(in_all // 2, 1) if share == "auto" else share,
        trusted=tuple(map(ipaddress.ip_network, config.trusted_proxies)),
    )


def few_connections(config: ListenConfig, limits: ConnectionLimits, open_files: int) -> str:
    """A sentence for the operator if the limit of open files leaves only few connections, or an empty text."""
    if config.max_connections != "auto" or limits.in_all >= FEW:
        return ""
    return (
        f"Rota takes at most {limits.in_all} connections, because this process may open only {open_files} files; "
        "ulimit -n raises that limit."
    )


def group_of(host: str) -> str:
    """What counts as one address: with IPv6 a network of /64, because one client has all of its addresses."""
    address = _address(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


# ── log ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The connection log writes at most one line a minute about connections that were refused or closed.

LOG = logging.getLogger("rota.server")

EVERY_S = 60.0
# The first line waits this long, so that it counts the whole of a sudden flood.
GATHER_S = 1.0


class ConnectionLog:
    """Counts for metrics, and for the next line. For the event loop only."""

    def __init__(self, meters: ConnectionMeters, busiest: Callable[[], str]) -> None:
        """`busiest` names the address with most connections, for the operator to look at."""
        self.meters = meters
        self._busiest = busiest
        self._counts: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0

    def refused(self, why: ConnectionRefusal) -> None:
        self.meters.refused[why] += 1
        self._count(f"refused_{why.value}")

    def closed(self, why: Closure) -> None:
        self.meters.closed[why] += 1
        self._count(why.value)

    def write(self) -> None:
        """Write the line now, if there is something to say."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if not self._counts:
            return
        fields = {**self._counts, "open": self.meters.open, "limit": self.meters.most, "busiest": self._busiest()}
        LOG.warning("Connections were refused or closed.", extra={"fields": fields})
        self._counts.clear()
        self._next_at = asyncio.get_running_loop().time() + EVERY_S

    def _count(self, what: str) -> None:
        self._counts[what] += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time() + GATHER_S, self._next_at), self.write)


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
                self.log.refused(ConnectionRefusal.ADDRESS)
                return None
        elif self._meters.open >= self._limits.in_all and not self.make_room():
            self.log.refused(ConnectionRefusal.ALL)
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
