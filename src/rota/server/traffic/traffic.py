"""Traffic knows the route of each name that has one, copies to shadows, and rolls back a route whose target fails."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from rota.core.adapter import Adapter
from rota.core.errors import FaultCode, RequestError
from rota.core.events import AdapterRefused, AdapterRemoved, EngineRestarted, Event, Finished
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.observe.journey import Journey
from rota.observe.meters import TrafficMeters, count
from rota.runtime.registry import Registry
from rota.server.adapters.manager import AdapterManager
from rota.server.streams import CallReply
from rota.server.traffic.route import Chosen, Route, TrafficSplit

# ── shadows ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Shadows get copies of requests at the lowest priority; their answers are counted and dropped.

# Below all that a client may ask for, so that of two requests that wait the copy is always the later one.
LOWEST_PRIORITY = -1000
# A tenant of their own, with next to no share, so that no key pays for copies and no other tenant waits for them.
TENANT = Tenant(name="(shadows)", weight=0.001, priority=LOWEST_PRIORITY)
# Copies may hold a row in so many.
ROWS_PER_COPY = 8
# A copy that takes longer is ended: no client reads its answer.
TIMEOUT_S = 120.0
_ENDING = "-shadow"


class Shadows:
    """Opens copies, as many as fit beside real requests. Everything here runs on the event loop."""

    def __init__(
        self,
        send: Callable[[Request], CallReply],
        rows: Callable[[], int],
        meters: TrafficMeters | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` sends a request to the service. `rows` says how many rows the engines have now."""
        self._send = send
        self._rows = rows
        self.meters = meters or TrafficMeters()
        self._now = now
        self._open: dict[RequestId, tuple[CallReply, float]] = {}  # and when it was opened, the first one first

    def copy(self, requests: Iterable[Request], shadow: Adapter) -> None:
        """Ask a shadow what was asked of another. A copy that finds no room is dropped, never kept for later."""
        self._end_late()
        for request in requests:
            if len(self._open) >= max(1, self._rows() // ROWS_PER_COPY):
                count(self.meters.shadows, "dropped")
            else:
                self._ask(_copy_of(request, shadow))

    def ended(self, request_id: RequestId, ending: Finished) -> None:
        """A request has ended, and may have been a copy."""
        if self._open.pop(request_id, None):
            count(self.meters.shadows, ending.fault.code.value if ending.fault else ending.reason.value)

    def _ask(self, request: Request) -> None:
        try:
            self._open[request.request_id] = (self._send(request), self._now())
        except RequestError as error:  # the service is down, and the real request has been told
            count(self.meters.shadows, error.fault.code.value)

    def _end_late(self) -> None:
        """An engine that died may have taken copies along, and no client waits for them."""
        for request_id, (reply, opened_at) in list(self._open.items()):
            if self._now() - opened_at < TIMEOUT_S:
                break
            del self._open[request_id]
            reply.close()
            count(self.meters.shadows, "dropped")


def _copy_of(request: Request, shadow: Adapter) -> Request:
    return replace(
        request,
        request_id=RequestId(f"{request.request_id}{_ENDING}"),
        adapter_id=shadow.adapter_id,
        tenant=TENANT,
        priority=LOWEST_PRIORITY,
        first_token_s=None,
    )


# ── traffic ─────────────────────────────────────────────────────────────────────────────────────────────────────────

LOG = logging.getLogger("rota.traffic")

# The ends of requests that say something of their adapter, in the words of a roll-back's reason.
_FAILURES = {
    FaultCode.NOT_A_NUMBER: "computed a value that is not a number",
    FaultCode.ADAPTER_FAILED: "could not be served",
    FaultCode.SOURCE_AWAY: "could not be read: its source is away",
    FaultCode.DISK_FULL: "could not be read: the server's disk is full",
    FaultCode.DISK_FAILED: "could not be read: the server's disk fails",
}
# One death of an engine may be a coincidence. If the next one dies of the same version so soon, that is the cause.
DIES_AGAIN_S = 600.0


class Traffic:
    """All routes, by name. Everything here runs on the event loop."""

    def __init__(
        self,
        registry: Registry,
        shadows: Shadows,
        now: Callable[[], float] = time.time,
        first: Iterable[Route] = (),
        is_open_to: Callable[[str, Adapter], bool] = lambda *_: True,
    ) -> None:
        """`now` is in seconds since 1970: an operator reads when a route was rolled back. `first` are set at once.

        `is_open_to` says whether a key, by its name, may use an adapter now.
        """
        self._registry = registry
        self.shadows = shadows
        self._now = now
        self._is_open_to = is_open_to
        self._routes: dict[str, Route] = {}
        self._retire: Callable[[str], None] = lambda _: None
        for route in first:
            self.set(route)

    def tie(self, adapters: AdapterManager) -> None:
        """Versions stay while a route needs them, and a route ends with its name."""
        adapters.holders.append(self.holds)
        adapters.on_unload = self.end
        self._retire = adapters.retire

    @property
    def meters(self) -> TrafficMeters:
        return self.shadows.meters

    @property
    def routes(self) -> list[Route]:
        """In the order of their setting."""
        return list(self._routes.values())

    def route_of(self, name: str) -> Route | None:
        return self._routes.get(name)

    def set(self, route: Route) -> None:
        """Send the requests of a name as the route says, from the next one on."""
        before = self._routes.get(route.name)
        self._routes[route.name] = route
        self.meters.weigh(route.name, route.split.weights)
        self._release(before)

    def roll_back(self, route: Route) -> None:
        """An operator wants all requests of a route at the target that it rolls back to."""
        route.split = TrafficSplit({route.rollback: 1.0})
        self.meters.weigh(route.name, route.split.weights)

    def end(self, name: str) -> None:
        """A name has no route from now on."""
        self.meters.weigh(name, {})
        self._release(self._routes.pop(name, None))

    def _release(self, route: Route | None) -> None:
        """Versions that the route needed may leave now."""
        for name in {found.name for one in route.named if (found := self._registry.get(one))} if route else ():
            self._retire(name)

    def holds(self, adapter: Adapter) -> bool:
        """Whether a route needs this version, so that it stays when its name means another."""
        return any(adapter.label in route.named for route in self._routes.values())

    def choose(self, named: Adapter, asker: str | None) -> Chosen:
        """Who answers a request for a name: what its route says, or the name's current version."""
        route = self._routes.get(named.name)
        if route is None:
            return Chosen(named)
        target = route.split.choose(asker)
        adapter = self._target(route, target)
        if adapter is None:
            target = route.rollback
            # Whatever has left: the name itself is here.
            adapter = self._target(route, target) or named
        route.requests[target] = route.requests.get(target, 0) + 1
        shadow = self._target(route, route.shadow) if route.shadow else None
        return Chosen(adapter, route.name, target, shadow)

    def _target(self, route: Route, target: str) -> Adapter | None:
        """Who answers for a target; None, and it is dropped, if it was unloaded or its route has no right to it now.

        A route has the right of the key that set it, which may lose that right. Versions of its own name need none.
        """
        adapter = self._registry.get(target)
        if adapter is None:
            self._leave(route, target)
        elif route.set_by and adapter.name != route.name and not self._is_open_to(route.set_by, adapter):
            words = f"the key '{route.set_by}', which set the route, may not use '{target}' any more."
            self._drop(route, target, words, FaultCode.FORBIDDEN.value)
            return None
        return adapter

    def observe(self, events: Iterable[Event]) -> None:
        """A target may be unloaded, or be lost when an engine reads it again."""
        for event in events:
            match event:
                case AdapterRefused(others_serve=False):
                    if event.code is not FaultCode.ENGINE_DIED:
                        self._failed(event.adapter_id, f"could not be read: {event.reason}", "failed")
                    self._look_for_leavers()
                case AdapterRemoved():
                    self._look_for_leavers()
                case EngineRestarted(died_of=adapter_id) if adapter_id is not None:
                    self._died(adapter_id, event.at)

    def ended(self, request_id: RequestId, journey: Journey, ending: Finished) -> None:
        """A request has ended; its end may say that its adapter is bad."""
        self.shadows.ended(request_id, ending)
        if ending.fault and (words := _FAILURES.get(ending.fault.code)):
            self._failed(journey.adapter_id, f"{words}.", ending.fault.code.value)

    def _died(self, adapter_id: AdapterId, at: float) -> None:
        """An engine died by itself while it read or served this adapter and no other."""
        for route, target in self._naming(adapter_id):
            before_s = at - route.deaths.get(target, -math.inf)
            route.deaths[target] = at
            if 0.0 < before_s < DIES_AGAIN_S:
                words = f"alone was read or served when an engine died, twice within {DIES_AGAIN_S / 60:g} minutes."
                self._drop(route, target, f"'{target}' {words}", FaultCode.ENGINE_DIED.value)

    def _failed(self, adapter_id: AdapterId, words: str, cause: str) -> None:
        for route, target in self._naming(adapter_id):
            self._drop(route, target, f"'{target}' {words}", cause)

    def _naming(self, adapter_id: AdapterId) -> list[tuple[Route, str]]:
        """The routes that need a version, and as what."""
        named = [(route, target) for route in self._routes.values() for target in route.named]
        return [one for one in named if (found := self._registry.get(one[1])) and found.adapter_id == adapter_id]

    def _look_for_leavers(self) -> None:
        for name, route in list(self._routes.items()):
            if self._registry.loaded(name) is None:
                self.end(name)
                continue
            for target in route.named:
                if self._registry.get(target) is None:
                    self._leave(route, target)

    def _leave(self, route: Route, target: str) -> None:
        self._drop(route, target, f"'{target}' was unloaded.", "unloaded")

    def _drop(self, route: Route, target: str, reason: str, cause: str) -> None:
        """Send a target no more requests. What a route rolls back to stays: there is nothing better."""
        if target == route.shadow:
            before = replace(route)
            route.end_shadow(reason)
            self._release(before)
            self._warn("A shadow gets no more copies.", route, reason)
        if target in route.split.weights and target != route.rollback:
            before = replace(route)
            route.roll_back(reason, self._now())
            self._release(before)
            count(self.meters.rollbacks, cause)
            self.meters.weigh(route.name, route.split.weights)
            self._warn("A route was rolled back.", route, reason)

    def _warn(self, message: str, route: Route, reason: str) -> None:
        LOG.warning(message, extra={"fields": {"adapter": route.name, "to": route.rollback, "why": reason}})
