"""The tenants of open requests, and trouble: errors that clients were told, and engines that were started again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from rota.core.events import EngineRestarted, PauseChanged, Whereabouts
from rota.core.ids import EngineId
from rota.dashboard.frame import ErrorRow, Restart, TenantRow
from rota.dashboard.window import Span
from rota.server.access.limits import LimitUse

# ── trouble ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Trouble: the errors that clients were told, by kind, and the engines that were started again or are paused.

MOST_RESTARTS = 10
MOST_KINDS = 50
LONGEST_SENTENCE = 300


class Trouble:
    """Bounded: the kinds of errors are few, and of each only the last sentence is kept."""

    def __init__(self) -> None:
        self.restarts_by = Counter[EngineId]()
        self.paused: set[EngineId] = set()
        self.restarts: deque[Restart] = deque(maxlen=MOST_RESTARTS)
        self._errors: dict[str, ErrorRow] = {}

    def hear(self, event: EngineRestarted | PauseChanged) -> None:
        if isinstance(event, PauseChanged) and event.is_paused:
            self.paused.add(event.engine_id)
            return
        self.paused.discard(event.engine_id)  # a new engine says itself that it is paused
        if isinstance(event, EngineRestarted):
            self.restarts_by[event.engine_id] += 1
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
# The tenants of open requests: how many of each wait and were admitted, what they may spend, and their errors.

MOST_TENANTS = 40

# How far a tenant has used up the limits of its key, with so many answers that were admitted and that wait.
UsedLimits = Callable[[str, int, int], tuple[LimitUse, ...]]


def tenant_rows(
    counts: Mapping[Hashable, Counter[Whereabouts]], span: Span, limits: UsedLimits
) -> tuple[tuple[TenantRow, ...], int]:
    """A row for each tenant with requests now, or tokens or errors in the window, the busiest first, and how many have
    none."""
    # The sole tenant of a server without keys has no name.
    names = {one for one in {*span.total.shares, *counts} if isinstance(one, str)} - {""}
    figures = {name: (counts.get(name, Counter[Whereabouts]()), span.figures_of(name)) for name in names}
    busiest = sorted(figures.items(), key=lambda one: (-one[1][0].total(), -one[1][1].tokens_per_s, one[0]))
    rows = [
        TenantRow(
            name=name,
            waiting=held[Whereabouts.WAITING],
            running=held[Whereabouts.RUNNING],
            parked=held[Whereabouts.PARKED],
            ttft=own.ttft,
            tokens_per_s=own.tokens_per_s,
            errors=own.errors,
            limits=limits(name, held.total() - held[Whereabouts.WAITING], held[Whereabouts.WAITING]),
        )
        for name, (held, own) in busiest[:MOST_TENANTS]
    ]
    return tuple(sorted(rows, key=lambda row: row.name)), len(busiest) - len(rows)
