"""The tenants of open requests, and trouble: errors that clients were told, and engines that were started again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container
from dataclasses import replace

from rota.core.events import EngineRestarted, PauseChanged
from rota.core.ids import AdapterId, EngineId
from rota.dashboard.frame import ErrorRow, Restart, TenantRow
from rota.dashboard.window import Span

# ── trouble ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Trouble: the errors that clients were told, by kind, and the engines that were started again or are paused.

MOST_RESTARTS = 10
MOST_KINDS = 50
LONGEST_SENTENCE = 300


class Trouble:
    """Bounded: the kinds of errors are few, and of each only the last sentence is kept."""

    def __init__(self) -> None:
        self.restarts_total = 0
        self.paused: set[EngineId] = set()
        self.restarts: deque[Restart] = deque(maxlen=MOST_RESTARTS)
        self._errors: dict[str, ErrorRow] = {}

    def hear(self, event: EngineRestarted | PauseChanged) -> None:
        if isinstance(event, PauseChanged) and event.is_paused:
            self.paused.add(event.engine_id)
            return
        self.paused.discard(event.engine_id)  # a new engine says itself that it is paused
        if isinstance(event, EngineRestarted):
            self.restarts_total += 1
            reason = event.reason[:LONGEST_SENTENCE]
            self.restarts.append(Restart(at=event.at, engine=event.engine_id, reason=reason))

    def note(self, kind: str, sentence: str, at: float) -> bool:
        """Count an error. False if there are too many kinds."""
        before = self._errors.get(kind)
        if before is None and len(self._errors) >= MOST_KINDS:
            return False
        total = before.total + 1 if before else 1
        self._errors[kind] = ErrorRow(kind=kind, total=total, last_at=at, sentence=sentence[:LONGEST_SENTENCE])
        return True

    def errors(self, span: Span) -> tuple[ErrorRow, ...]:
        """Every kind that came, the newest first."""
        rows = sorted(self._errors.values(), key=lambda row: -row.last_at)
        return tuple(replace(row, recent=span.total.errors[row.kind]) for row in rows)


# ── tenants ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The tenants of open requests: how many of each wait, and how many were admitted, by adapter.

MOST_TENANTS = 40


class Tenants:
    """Counts as requests come, are admitted, and go. A tenant without requests takes no memory."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, AdapterId | None]] = Counter()  # None: of those that wait

    def count(self, tenant: str, admitted: AdapterId | None, by: int) -> None:
        """A request of an adapter was admitted or, without one, began to wait; or it does so no longer."""
        self._requests[tenant, admitted] += by
        if not self._requests[tenant, admitted]:
            del self._requests[tenant, admitted]

    def rows(self, span: Span, ready: Container[AdapterId]) -> tuple[tuple[TenantRow, ...], int]:
        """A row for each tenant with requests now or tokens in the window, the busiest first, and how many have none.

        `ready` are the adapters that are in a slot: requests of one that is not are parked.
        """
        waiting, running, parked = Counter[str](), Counter[str](), Counter[str]()
        for (tenant, admitted), count in self._requests.items():
            (waiting if admitted is None else running if admitted in ready else parked)[tenant] += count
        recent = (one for one in span.total.shares if isinstance(one, str))
        # The sole tenant of a server without keys has no name.
        figures = {name: span.figures_of(name) for name in {*recent, *waiting, *running, *parked} - {""}}
        rows = [
            TenantRow(
                name=name,
                waiting=waiting[name],
                running=running[name],
                parked=parked[name],
                ttft=own.ttft,
                tokens_per_s=own.tokens_per_s,
            )
            for name, own in figures.items()
        ]
        rows.sort(key=lambda row: (-(row.waiting + row.running + row.parked), -row.tokens_per_s, row.name))
        return tuple(sorted(rows[:MOST_TENANTS], key=lambda row: row.name)), len(rows[MOST_TENANTS:])
