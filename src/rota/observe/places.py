"""Places limit how many adapters have meters of their own, however many adapters a server has in its life."""

from __future__ import annotations

import math
from collections import OrderedDict

from rota.core.adapter import BASE_LABEL, OTHER_LABEL
from rota.observe.meters import AdapterMeters

MOST_ADAPTERS = 50

# Several scrapes long: an adapter's last numbers are scraped before its meters go.
IDLE_S = 600.0


class Places:
    """An adapter takes a free place at its first request, else the place of a long idle one, else it shares `other`.

    Numbers never move from one place to another: a sum that jumps would look like traffic. An adapter that loses its
    place and comes back begins at zero; scrapers treat that as a restart.
    """

    def __init__(self, most: int, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._taken: OrderedDict[str, AdapterMeters] = OrderedDict()  # used longest ago first
        self.base = AdapterMeters(BASE_LABEL)
        self.other = AdapterMeters(OTHER_LABEL)

    @property
    def shown(self) -> list[AdapterMeters]:
        """All meters; `other` only once it has counted a request."""
        others = [self.other] if self.other.used_at > -math.inf else []
        return [self.base, *self._taken.values(), *others]

    def find(self, label: str) -> AdapterMeters:
        """The meters that count an adapter now."""
        return self.base if label == BASE_LABEL else self._taken.get(label, self.other)

    def take(self, label: str, at: float) -> AdapterMeters:
        """The meters for an adapter's new request: in a place of its own if it has one or finds one."""
        meters = self.find(label)
        if meters is self.other and label != OTHER_LABEL and self._make_room(at):
            meters = self._taken[label] = AdapterMeters(label)
        self.touch(meters, at)
        return meters

    def touch(self, meters: AdapterMeters, at: float) -> None:
        meters.used_at = at
        if meters.label in self._taken:
            self._taken.move_to_end(meters.label)

    def release(self, label: str) -> None:
        """An adapter is gone: its meters stay until another adapter needs a place, and then go first."""
        if meters := self._taken.get(label):
            meters.used_at = -math.inf
            self._taken.move_to_end(label, last=False)

    def _make_room(self, at: float) -> bool:
        if len(self._taken) < self._most:
            return True
        if not self._taken:
            return False
        longest_idle = next(iter(self._taken.values()))
        if longest_idle.open:
            self.touch(longest_idle, at)  # not idle: one of its requests takes very long
            return False
        if at - longest_idle.used_at < self._idle_s:
            return False
        del self._taken[longest_idle.label]
        return True
