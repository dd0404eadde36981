"""A time-out says how long the supervisor waits for an engine, and a silence is the wait so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.core.standstill import StoodStill
from rota.runtime.wire import Alive, Failed, Ready

# The supervisor looks at the engine at least this often.
LOOK_S = 1.0
# A step may take this many times as long as it should, by its tokens and by recent steps.
STEP_MARGIN = 10.0
# Long enough to send the last words of a process that ends.
LINGER_S = 2.0
# A killed process that is inside the driver may need a while to end.
KILL_S = 10.0


def complaint_of(event: StoodStill) -> str:
    """What an engine did not do, though its loop goes round."""
    wait = "request waits" if event.requests == 1 else "requests wait"
    return (
        f"The engine hung: no step for {event.still_s:.3g} seconds, while {event.requests} {wait} "
        "and nothing they wait for is under way."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """How long the supervisor waits, and how often it tries again."""

    start_s: float = 900.0
    # Of a start: one read of a large tensor, or one compiler run, tells nothing while it lasts.
    start_silence_s: float = 300.0
    # Of an engine that serves. It tells that it is alive twice a second, but a step on a slow CPU takes seconds.
    silence_s: float = 20.0
    # A step that should take long may be silent for longer, but never longer than this, unless `silence_s` is more.
    most_silence_s: float = 300.0
    # An engine that was never ready, or served for less than this, died quickly. After `quick_deaths` in a row it
    # stays down.
    quick_death_s: float = 5.0
    quick_deaths: int = 5
    # The pause before the next start; it doubles with every quick death.
    pause_s: float = 0.25
    stop_s: float = 3.0


class Silence:
    """How long an engine has said nothing, and whether that is too long.

    Only time in which the supervisor itself ran counts. A frozen container or a paused machine stops both processes,
    and the engine must not be killed for that.
    """

    def __init__(self, timeouts: EngineTimeouts) -> None:
        self._timeouts = timeouts
        self._silent_s = 0.0
        self._starting_s = 0.0
        self._is_ready = False
        self._limit_s = timeouts.start_silence_s

    @property
    def left_s(self) -> float:
        """How long the engine may go on without a word."""
        left_s = self._limit_s - self._silent_s
        return left_s if self._is_ready else min(left_s, self._timeouts.start_s - self._starting_s)

    @property
    def complaint(self) -> str:
        """What the engine did not do in time; empty while there is time left."""
        if self.left_s > 0.0:
            return ""
        if self._is_ready:
            return f"The engine hung: it said nothing for {self._limit_s:g} seconds."
        if self._starting_s >= self._timeouts.start_s:
            return f"The engine was not ready after {self._timeouts.start_s:g} seconds."
        return f"The engine hung: its start made no progress for {self._limit_s:g} seconds."

    def spend(self, seconds: float) -> None:
        """The supervisor has waited this long."""
        self._silent_s += seconds
        self._starting_s += seconds

    def hear(self, records: list[Any]) -> None:
        """The engine has said something; a record may change how long it may be silent from now on."""
        self._silent_s = 0.0
        for record in records:
            match record:
                case Ready():
                    self._is_ready, self._limit_s = True, self._timeouts.silence_s
                case Alive(expected_s):
                    limit_s = min(STEP_MARGIN * expected_s, self._timeouts.most_silence_s)
                    self._limit_s = max(limit_s, self._timeouts.silence_s)
                case Failed():
                    self.limit(LINGER_S)

    def limit(self, seconds: float) -> None:
        """The engine is about to end, and has this long."""
        self._silent_s, self._is_ready, self._limit_s = 0.0, True, seconds
