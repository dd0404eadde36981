"""Columns hold what a choice reads of all replicas: an array for each thing, with a place for each replica.

The rule is that of `policy/routing.py`, and so is every choice, to the bit. A view for each replica takes 2 µs of a
choice, and a place in an array a few nanoseconds: a choice among 512 replicas costs little more than one among 16.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rota.core.ids import BASE, AdapterId
from rota.policy.routing import TO_AND_FRO, Choice, Prices, RouteReason

# How a replica holds an adapter: any of these together. One that is busy has requests for it.
IN_HOST, IN_SLOT, BUSY = 1, 2, 4
HAS_SLOT = IN_SLOT | BUSY  # with requests there the adapter has its turns
WAYS = 8

Seconds = NDArray[np.float64]
Ways = NDArray[np.uint8]


class Columns:
    """Bounded by what replicas hold: an adapter that no replica holds has no row."""

    def __init__(self, replicas: int) -> None:
        # Tokens, and not seconds: what a token costs is measured anew all the time, and is the same for all replicas.
        self.queue_tokens: NDArray[np.float64] = np.zeros(replicas)
        self._is_up = np.ones(replicas, np.bool_)
        self._up = replicas  # how many are
        self._away_s: Seconds = np.zeros(replicas)  # infinite while a replica is down
        # How long the line for a slot is, by the slots, for an adapter without requests there and for one with some.
        self._crowd: Seconds = np.zeros((2, replicas))
        self._held: dict[AdapterId, Ways] = {}

    def __len__(self) -> int:
        return len(self.queue_tokens)

    @property
    def rows(self) -> int:
        """Adapters that some replica holds."""
        return len(self._held)

    def add(self) -> None:
        """One more replica, which holds nothing and is not up yet."""
        self.queue_tokens, self._away_s = np.append(self.queue_tokens, 0.0), np.append(self._away_s, math.inf)
        self._is_up = np.append(self._is_up, False)
        self._crowd = np.pad(self._crowd, ((0, 0), (0, 1)))
        self._held = {adapter_id: np.append(row, np.uint8(0)) for adapter_id, row in self._held.items()}

    def set_up(self, replica: int, is_up: bool) -> None:
        self._is_up[replica] = is_up
        self._up = int(np.count_nonzero(self._is_up))
        self._away_s[replica] = 0.0 if is_up else math.inf

    def set_crowd(self, replica: int, newcomer: float, known: float) -> None:
        """The line for a slot, for an adapter without requests at the replica and for one with some."""
        self._crowd[0, replica], self._crowd[1, replica] = newcomer, known

    def hold(self, replica: int, adapter_id: AdapterId, way: int) -> None:
        row = self._held.get(adapter_id)
        if row is None:
            row = self._held[adapter_id] = np.zeros(len(self), np.uint8)
        row[replica] |= way

    def drop(self, replica: int, adapter_id: AdapterId, ways: int = WAYS - 1) -> None:
        row = self._held.get(adapter_id)
        if row is not None:
            row[replica] &= ~ways & WAYS - 1
            if not np.count_nonzero(row):
                del self._held[adapter_id]

    def cheapest(self, adapter_id: AdapterId, prices: Prices, answer_s: float, seen: Seconds | None) -> Choice | None:
        """What `policy.routing.route` says of the same replicas, for an answer that will take so long.

        `seen` is how many tokens of the prompt each replica has computed before; None: none of them.
        """
        if not self._up:
            return None
        token_s = prices.token_s
        queue_s = self.queue_tokens * token_s
        price_s = queue_s + self._away_s if seen is None else queue_s - seen * token_s + self._away_s
        held = None
        if adapter_id != BASE:
            held = self._held.get(adapter_id)
            price_s += self._pauses(held, answer_s)
            price_s += _lack_s(held, prices)
        best = int(price_s.argmin())
        return Choice(best, self._reason(best, held, seen))

    def _pauses(self, held: Ways | None, answer_s: float) -> Seconds:
        newcomer, known = self._crowd[0], self._crowd[1]
        crowd: Seconds = newcomer if held is None else np.where(held >= BUSY, known, newcomer)
        return crowd * answer_s

    def _reason(self, best: int, held: Ways | None, seen: Seconds | None) -> RouteReason:
        if self._up == 1:
            return RouteReason.ONLY_ONE
        if held is not None and (reason := self._held_reason(int(held[best]), held)):
            return reason
        if seen is not None and seen[best]:
            return RouteReason.CACHED_PREFIX
        is_as_short = self.queue_tokens <= self.queue_tokens[best]
        is_shortest = np.count_nonzero(is_as_short & self._is_up) == 1
        return RouteReason.SHORTEST_QUEUE if is_shortest else RouteReason.LOWEST_NUMBER

    def _held_reason(self, own: int, held: Ways) -> RouteReason | None:
        if own & HAS_SLOT:
            return RouteReason.IN_SLOT
        ways = int(np.bitwise_or.reduce(held[self._is_up]))
        if ways & HAS_SLOT:
            return RouteReason.HOLDERS_BUSY
        if own:
            return RouteReason.IN_HOST_MEMORY
        return RouteReason.HOLDERS_BUSY if ways else None


def _lack_s(held: Ways | None, prices: Prices) -> Seconds | float:
    """What replicas pay for what they lack of an adapter."""
    load_s = TO_AND_FRO * prices.load_s
    absent_s = load_s + TO_AND_FRO * prices.fetch_s
    if held is None:
        return absent_s
    by_way = np.zeros(WAYS)
    by_way[0], by_way[IN_HOST] = absent_s, load_s
    return by_way.take(held)
