"""Trouble: the errors that clients were told, by kind, and the engines that were started again or are paused."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from rota.core.events import EngineRestarted, PauseChanged
from rota.core.ids import EngineId
from rota.dashboard.frame import ErrorRow, Restart
from rota.dashboard.window import Span

MOST_RESTARTS = 10
MOST_KINDS = 50
LONGEST_SENTENCE = 300


@dataclass(frozen=True, slots=True)
class LastError:
    at: float
    sentence: str


class Trouble:
    """Bounded: the kinds of errors are few, and of each only the last sentence is kept."""

    def __init__(self) -> None:
        self.restarts_total = 0
        self.paused: set[EngineId] = set()
        self._restarts: deque[Restart] = deque(maxlen=MOST_RESTARTS)
        self._totals: Counter[str] = Counter()
        self._last: dict[str, LastError] = {}

    @property
    def restarts(self) -> tuple[Restart, ...]:
        return tuple(self._restarts)

    def hear(self, event: EngineRestarted | PauseChanged) -> None:
        if isinstance(event, PauseChanged) and event.is_paused:
            self.paused.add(event.engine_id)
            return
        self.paused.discard(event.engine_id)  # a new engine says itself that it is paused
        if isinstance(event, EngineRestarted):
            self._restart(event)

    def _restart(self, event: EngineRestarted) -> None:
        self.restarts_total += 1
        reason = event.reason[:LONGEST_SENTENCE]
        self._restarts.append(Restart(at=event.at, engine=event.engine_id, reason=reason))

    def note(self, kind: str, sentence: str, at: float) -> bool:
        """Count an error. False if there are too many kinds."""
        if kind not in self._totals and len(self._totals) >= MOST_KINDS:
            return False
        self._totals[kind] += 1
        self._last[kind] = LastError(at, sentence[:LONGEST_SENTENCE])
        return True

    def errors(self, span: Span) -> tuple[ErrorRow, ...]:
        """Every kind that came, the newest first."""
        kinds = sorted(self._last, key=lambda kind: -self._last[kind].at)
        return tuple(
            ErrorRow(
                kind=kind,
                recent=span.errors[kind],
                total=self._totals[kind],
                last_at=self._last[kind].at,
                sentence=self._last[kind].sentence,
            )
            for kind in kinds
        )
