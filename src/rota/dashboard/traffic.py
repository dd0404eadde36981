"""Traffic on the page: a row for each target of each name whose requests are sent by weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol

from rota.dashboard.frame import TargetRow

MOST_TARGETS = 40


class RouteView(Protocol):
    """A traffic route, as far as the page shows it."""

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> Mapping[str, float]: ...

    @property
    def requests(self) -> Mapping[str, int]: ...

    @property
    def shadow(self) -> str | None: ...

    @property
    def note(self) -> str:
        """Why it is not as it was set; empty if it is."""
        ...


def target_rows(routes: Iterable[RouteView]) -> tuple[TargetRow, ...]:
    return tuple(islice((row for route in routes for row in _rows(route)), MOST_TARGETS))


def _rows(route: RouteView) -> Iterator[TargetRow]:
    note = route.note
    for target, weight in route.weights.items():
        requests = route.requests.get(target, 0)
        yield TargetRow(name=route.name, target=target, weight=weight, requests=requests, note=note)
        note = ""  # once for a name
    if route.shadow:
        yield TargetRow(name=route.name, target=route.shadow, weight=None, requests=0, note="copies; answers dropped")
