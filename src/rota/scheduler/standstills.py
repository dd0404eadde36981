"""Standstills are noticed in the pass: requests are open, and no step has computed anything for long.

A standstill that lasts is told of again each time it has lasted twice as long. A standstill is stuck if nothing is
under way that the scheduler will be told of, and if no moment will change its answers: then it asks for no pass more.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import islice

from rota.core.standstill import STANDSTILL_S, StoodStill, WentOn
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft, Flight
from rota.scheduler.standing import Standings

# An event has the reasons of so many requests at most.
MOST_REASONS = 20


class Standstills:
    """Costs a few comparisons a pass while steps run."""

    def __init__(self, books: Books, standings: Standings, limit_s: float = STANDSTILL_S) -> None:
        self._books = books
        self._standings = standings
        self._limit_s = limit_s
        self.forget()

    def forget(self) -> None:
        """Nothing stands still."""
        self._since = math.inf  # the first pass of this standstill
        self._due_at = math.inf  # when it is told, or told again
        self._told = ""  # the kind that was told last

    def note(self, draft: Draft, flights: Collection[Flight]) -> None:
        """At the end of every pass; `flights` are the steps before this one that have not ended."""
        books, now = self._books, draft.now
        is_paused, computes = books.paused_at is not None, draft.chunks or draft.decodes
        if computes or is_paused or not books.sequences or any(one.chunks or one.decodes for one in flights):
            self._end(now)
            return
        if self._since == math.inf:
            self._since, self._due_at = now, now + self._limit_s
        waits_for = self._waits_for(draft, flights)
        has_stuck = self._told == "waiting" and not waits_for
        if now >= self._due_at or has_stuck:
            self._tell(now, waits_for)
        if waits_for or not self._told:
            draft.ask_again(self._due_at)

    def _end(self, now: float) -> None:
        if self._told:
            self._books.outbox.append(WentOn(now, now - self._since, self._books.engine_id))
        if self._since < math.inf:
            self.forget()

    def _waits_for(self, draft: Draft, flights: Collection[Flight]) -> str:
        """What will bring another pass, without a message from outside."""
        reads, copies = self._books.hosts.reads, len(self._books.slots.on_their_way)
        under_way = {
            f"reads of adapters ({reads})": reads,
            f"copies into slots ({copies})": copies,
            "adapters that leave": draft.drops or flights,
            f"a delay of {max(0.0, draft.wake_at - draft.now):.1f} s": draft.wake_at < math.inf,
        }
        return ", ".join(words for words, is_so in under_way.items() if is_so)

    def _tell(self, now: float, waits_for: str) -> None:
        sequences = self._books.sequences
        explained = [self._standings.explained(one, now) for one in islice(sequences, MOST_REASONS)]
        reasons = [(one.request_id, one.reason or "it could run, and no step has it") for one in explained]
        event = StoodStill(
            at=now,
            since=self._since,
            requests=len(sequences),
            reasons=tuple(reasons),
            waits_for=waits_for,
            engine_id=self._books.engine_id,
            is_news=self._told != ("waiting" if waits_for else "stuck"),
        )
        self._books.outbox.append(event)
        self._told, self._due_at = event.kind, now + event.still_s
