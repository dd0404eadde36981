"""Places limit how many adapters or keys have meters of their own, however many a server has in its life."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from rota.core.adapter import OTHER_LABEL

MOST_ADAPTERS = 50
MOST_KEYS = 50

# Several scrapes long: an adapter's last numbers are scraped before its meters go.
IDLE_S = 600.0


class Labelled(Protocol):
    """Meters that can take a place."""

    label: str
    open: int  # requests that have not ended
    used_at: float


Meters = TypeVar("Meters", bound=Labelled)


class Places(Generic[Meters]):
    """A label takes a free place at its first request, else the place of a long idle one, else it shares `other`.

    Numbers never move from one place to another: a sum that jumps would look like traffic. A label that loses its
    place and comes back begins at zero; scrapers treat that as a restart.
    """

    def __init__(
        self, most: int, make: Callable[[str], Meters], always: Sequence[str] = (), idle_s: float = IDLE_S
    ) -> None:
        """The labels in `always` need no place."""
        self._most = most
        self._make = make
        self._idle_s = idle_s
        self._always = {label: make(label) for label in always}
        self._taken: OrderedDict[str, Meters] = OrderedDict()  # used longest ago first
        self.other = make(OTHER_LABEL)

    @property
    def shown(self) -> list[Meters]:
        """All meters; `other` only once it has counted a request."""
        others = [self.other] if self.other.used_at > -math.inf else []
        return [*self._always.values(), *self._taken.values(), *others]

    def has_own(self, label: str) -> bool:
        """Whether a label has a place of its own."""
        return label in self._taken

    def find(self, label: str) -> Meters:
        """The meters that count a label now."""
        return self._always.get(label) or self._taken.get(label, self.other)

    def take(self, label: str, at: float) -> Meters:
        """The meters for a label's new request: in a place of its own if it has one or finds one."""
        meters = self.find(label)
        if meters is self.other and label != OTHER_LABEL and self._make_room(at):
            meters = self._taken[label] = self._make(label)
        self.touch(meters, at)
        return meters

    def touch(self, meters: Meters, at: float) -> None:
        meters.used_at = at
        if meters.label in self._taken:
            self._taken.move_to_end(meters.label)

    def release(self, label: str) -> None:
        """A label is gone: its meters stay until another label needs a place, and then go first."""
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
