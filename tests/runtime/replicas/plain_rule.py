"""The rule of `policy/routing.py` as a plain loop over replicas, and a router that holds every choice against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rota.core.events import EngineRestarted, Event, HostChanged, HostState, SlotChanged, SlotState
from rota.core.ids import BASE, AdapterId
from rota.core.request import Request
from rota.policy.routing import TO_AND_FRO, Prices, RouteReason, RoutingChoice
from rota.runtime.replicas.router import ENDS, PrefixIndex, Router, Rule


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """One replica as one request sees it."""

    number: int
    is_up: bool = True
    queue_s: float = 0.0  # what the work that is open there adds to a request
    pause_s: float = 0.0  # how long the answer would pause there for the turns of other adapters
    has_slot: bool = False  # the adapter is in a slot there, or has requests there and so has its turns
    has_host_copy: bool = False
    prefix_tokens: int = 0  # of the prompt, those that the replica has computed before


def route(views: Sequence[ReplicaView], prices: Prices, needs_adapter: bool = True) -> RoutingChoice | None:
    """The replica with the lowest price, of equal ones the lowest number; None if no replica is up.

    A request for the base model pays for no adapter.
    """
    token_s = prices.token_s
    load_s = TO_AND_FRO * prices.load_s
    absent_s = load_s + TO_AND_FRO * prices.fetch_s
    best, best_s, is_alone = None, 0.0, True
    for view in views:
        if not view.is_up:
            continue
        price_s = view.queue_s - view.prefix_tokens * token_s
        if needs_adapter:
            price_s += view.pause_s
            if not view.has_slot:
                price_s += load_s if view.has_host_copy else absent_s
        if best is None:
            best, best_s = view, price_s
            continue
        is_alone = False
        if price_s < best_s:
            best, best_s = view, price_s
    if best is None:
        return None
    return RoutingChoice(best.number, RouteReason.ONLY_ONE if is_alone else _reason(views, best, needs_adapter))


def _reason(views: Sequence[ReplicaView], best: ReplicaView, needs_adapter: bool) -> RouteReason:
    if needs_adapter:
        if best.has_slot:
            return RouteReason.IN_SLOT
        if any(view.has_slot and view.is_up for view in views):
            return RouteReason.HOLDERS_BUSY
        if best.has_host_copy:
            return RouteReason.IN_HOST_MEMORY
        if any(view.has_host_copy and view.is_up for view in views):
            return RouteReason.HOLDERS_BUSY
    return RouteReason.CACHED_PREFIX if best.prefix_tokens else _by_queue(views, best)


def _by_queue(views: Sequence[ReplicaView], best: ReplicaView) -> RouteReason:
    is_shortest = all(view.queue_s > best.queue_s for view in views if view.is_up and view is not best)
    return RouteReason.SHORTEST_QUEUE if is_shortest else RouteReason.LOWEST_NUMBER


@dataclass(slots=True)
class HeldAdapters:
    """What one replica holds, by its events alone."""

    slots: set[AdapterId] = field(default_factory=set)
    hosts: set[AdapterId] = field(default_factory=set)

    def observe(self, event: Event) -> None:
        if isinstance(event, SlotChanged):
            (self.slots.discard if event.state is SlotState.EMPTY else self.slots.add)(event.adapter_id)
        elif isinstance(event, HostChanged):
            (self.hosts.discard if event.state is HostState.GONE else self.hosts.add)(event.adapter_id)
        elif isinstance(event, EngineRestarted):
            self.clear()

    def clear(self) -> None:
        self.slots.clear()
        self.hosts.clear()


class PlainlyChecked(Router):
    """Fails where the columns say something else than `route`."""

    checked = 0

    def __init__(self, replicas: int, rule: Rule = "adapters", has_prefix_cache: bool = True) -> None:
        super().__init__(replicas, rule, has_prefix_cache)
        self.held = [HeldAdapters() for _ in range(replicas)]

    def add(self) -> int:
        self.held.append(HeldAdapters())
        return super().add()

    def note_events(self, replica: int, events: Sequence[Event]) -> None:
        for event in events:
            self.held[replica].observe(event)
        super().note_events(replica, events)

    def note_down(self, replica: int) -> None:
        self.held[replica].clear()
        super().note_down(replica)

    def _cheapest(self, request: Request, answer_tokens: int) -> tuple[RoutingChoice | None, int]:
        plain = self.plain(request, answer_tokens)
        found = super()._cheapest(request, answer_tokens)
        assert found[0] == plain
        self.checked += 1
        return found

    def plain(self, request: Request, answer_tokens: int) -> RoutingChoice | None:
        views = [self._view(number, request, answer_tokens) for number in range(len(self.held))]
        return route(views, self._prices(), request.adapter_id != BASE)

    def _view(self, number: int, request: Request, answer_tokens: int) -> ReplicaView:
        adapter_id, books, held = request.adapter_id, self._replicas[number], self.held[number]
        is_busy = adapter_id in books.busy
        in_line = len(books.busy) + (not is_busy) - books.slot_count if books.slot_count else 0
        answer_s = answer_tokens * self._pace.step_s
        return ReplicaView(
            number=number,
            is_up=bool(self._columns.is_up[number]),
            queue_s=books.open_tokens * self._pace.token_s,
            pause_s=0.5 * in_line / books.slot_count * answer_s if in_line > 0 else 0.0,
            has_slot=is_busy or adapter_id in held.slots,
            has_host_copy=adapter_id in held.hosts,
            prefix_tokens=seen_by(self._prefixes, request, number) if self._prefixes is not None else 0,
        )


def seen_by(index: PrefixIndex, request: Request, replica: int) -> int:
    """How many tokens of a prompt a replica has seen: the longest beginning, if all shorter ones are known."""
    tokens = 0
    for end, key in zip(ENDS, index.keys_of(request), strict=False):
        holders = index._seen.get(key, 0)
        if not holders:
            break
        tokens = end if holders >> replica & 1 else tokens
    return tokens
