"""The ledger has every request's ending, every event of the run, and every promise that was broken."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .asks import Ask
from .endings import Ending, Kind


@dataclass(frozen=True, slots=True)
class Allowed:
    """How requests of a round may end beside a complete answer, because of the round's fault."""

    statuses: frozenset[int] = frozenset()
    cut: bool = False
    abort: bool = False


NOTHING_ELSE = Allowed()


def problem_with(ask: Ask, ending: Ending, allowed: Allowed) -> str:
    """What is wrong with an ending; empty if nothing is."""
    match ending.kind:
        case Kind.FINISHED:
            is_right = allowed.abort or "abort" not in ending.outcome
        case Kind.REFUSED:
            is_right = ending.status in ask.may_get | allowed.statuses
        case Kind.LEFT:
            is_right = ask.manner.leaves
        case Kind.CUT:
            is_right = allowed.cut
        case _:
            is_right = False
    return "" if is_right else f"{ask.path} ended so: {ending.outcome} ({ending.detail})"


@dataclass(slots=True)
class Ledger:
    """Writes down; decides nothing but what `problem_with` decides."""

    began_at: float = field(default_factory=time.monotonic)
    round: int = 0
    fault: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_fault: dict[str, Counter[str]] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    violations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at

    @property
    def ended(self) -> int:
        return self.outcomes.total()

    def begin_round(self, fault: str) -> None:
        self.round += 1
        self.fault = fault
        self.faults[fault] += 1
        self.events = []
        self.note(f"round {self.round}: {fault}")

    def note(self, event: str) -> None:
        self.events.append((round(self.age_s, 3), event))

    def note_ending(self, ask: Ask, ending: Ending, allowed: Allowed) -> None:
        self.outcomes[ending.outcome] += 1
        self.by_fault.setdefault(self.fault, Counter())[ending.outcome] += 1
        self.note(f"{ask.path} {ask.name}: {ending.outcome}")
        if problem := problem_with(ask, ending, allowed):
            self.violate(problem)

    def violate(self, what: str) -> None:
        """The events of the round so far are those around it."""
        self.note(f"VIOLATION: {what}")
        self.violations.append(
            {"round": self.round, "fault": self.fault, "what": what, "events": self.events[-60:], "log": ""}
        )
