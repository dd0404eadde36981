"""Shadows get copies of requests at the lowest priority; their answers are counted and dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from rota.core.adapter import Adapter
from rota.core.errors import RequestError
from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.observe.traffic_meters import TrafficMeters
from rota.server.streams import Reply

# Below all that a client may ask for, so that of two requests that wait the copy is always the later one.
LOWEST_PRIORITY = -1000
# A tenant of their own, with next to no share, so that no key pays for copies and no other tenant waits for them.
TENANT = Tenant(name="(shadows)", weight=0.001, priority=LOWEST_PRIORITY)
# Copies may hold a row in so many.
ROWS_PER_COPY = 8
# A copy that takes longer is ended: no client reads its answer.
PATIENCE_S = 120.0
_ENDING = "-shadow"


class Shadows:
    """Opens copies, as many as fit beside real requests. Everything here runs on the event loop."""

    def __init__(
        self,
        send: Callable[[Request], Reply],
        rows: Callable[[], int],
        meters: TrafficMeters | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` sends a request to the service. `rows` says how many rows the engines have now."""
        self._send = send
        self._rows = rows
        self.meters = meters or TrafficMeters()
        self._now = now
        self._open: dict[RequestId, tuple[Reply, float]] = {}  # and when it was opened, the first one first

    def copy(self, requests: Iterable[Request], shadow: Adapter) -> None:
        """Ask a shadow what was asked of another. A copy that finds no room is dropped, never kept for later."""
        self._end_late()
        for request in requests:
            if len(self._open) >= max(1, self._rows() // ROWS_PER_COPY):
                self.meters.shadowed("dropped")
            else:
                self._ask(_copy_of(request, shadow))

    def ended(self, request_id: RequestId, ending: Finished) -> None:
        """A request has ended, and may have been a copy."""
        if self._open.pop(request_id, None):
            self.meters.shadowed(ending.fault.code.value if ending.fault else ending.reason.value)

    def _ask(self, request: Request) -> None:
        try:
            self._open[request.request_id] = (self._send(request), self._now())
        except RequestError as error:  # the service is down, and the real request has been told
            self.meters.shadowed(error.fault.code.value)

    def _end_late(self) -> None:
        """An engine that died may have taken copies along, and no client waits for them."""
        for request_id, (reply, opened_at) in list(self._open.items()):
            if self._now() - opened_at < PATIENCE_S:
                break
            del self._open[request_id]
            reply.close()
            self.meters.shadowed("dropped")


def _copy_of(request: Request, shadow: Adapter) -> Request:
    return replace(
        request,
        request_id=RequestId(f"{request.request_id}{_ENDING}"),
        adapter_id=shadow.adapter_id,
        tenant=TENANT,
        priority=LOWEST_PRIORITY,
        first_token_s=None,
    )
