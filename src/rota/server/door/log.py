"""The connection log writes at most one line a minute about connections that were refused or closed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from rota.observe.connection_meters import Closure, ConnectionMeters, Refusal

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

    def refused(self, why: Refusal) -> None:
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
