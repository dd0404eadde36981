"""A pulse tells the supervisor that the loop goes round; it comes from the loop, because a thread would beat on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# The loop tells that it is alive at least this often while it waits.
BEAT_S = 0.5
# A shorter step changes no limit, so it is not worth a record of its own.
LONG_STEP_S = 0.1

# Gets the seconds of the longest step that was seen, or is expected of the steps in flight.
TellAlive = Callable[[float], None]


class Pulse:
    """For one loop: its beats, and how long its steps take."""

    def __init__(self, tell: TellAlive, token_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`token_s` is the time of one prompt token, as the device has measured it; 0 if it has not."""
        self._tell = tell
        self._token_s = token_s
        self._clock = clock
        self._in_flight: deque[tuple[float, float]] = deque()  # when each step began, and how long it may take
        self._longest_s = 0.0
        self._ended_at = 0.0  # the step before
        self._told_s = 0.0
        self._told_at = float("-inf")

    def beat(self) -> None:
        """Tell that the loop goes round, if the last word is old."""
        now = self._clock()
        if now - self._told_at >= BEAT_S:
            self._say(now)

    def step_begins(self, tokens: int) -> None:
        """Call it before the step: on a CPU the step is computed while it is submitted."""
        now = self._clock()
        self._in_flight.append((now, tokens * self._token_s))
        if self._longest() > max(self._told_s, LONG_STEP_S):
            self._say(now)

    def step_ended(self) -> None:
        """The oldest step in flight is done."""
        began_at, _ = self._in_flight.popleft()
        now = self._clock()
        self._longest_s = max(self._longest_s, now - max(began_at, self._ended_at))
        self._ended_at = now

    def _longest(self) -> float:
        return max([self._longest_s, *(expected_s for _, expected_s in self._in_flight)])

    def _say(self, now: float) -> None:
        self._told_s, self._told_at = self._longest(), now
        self._tell(self._told_s)
