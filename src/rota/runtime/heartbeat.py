"""A heartbeat tells the supervisor that the loop goes round; it comes from the loop, because a thread would beat on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rota.policy.step_times import StepTimes

# The loop tells that it is alive at least this often while it waits.
BEAT_S = 0.5
# A shorter step changes no limit, so it is not worth a record of its own.
LONG_STEP_S = 0.1

# Gets the seconds that the steps in flight should take, each of them.
TellAlive = Callable[[float], None]


class Heartbeat:
    """For one loop: its beats, and how long its steps should take, by their tokens and by recent steps."""

    def __init__(
        self, tell: TellAlive, times: StepTimes | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`times` are as the device has measured them, to begin with."""
        self._tell = tell
        self._times = times or StepTimes(0.0)
        self._clock = clock
        # When each step began, its tokens of prompts, and whether it computes at all.
        self._in_flight: deque[tuple[float, int, bool]] = deque()
        self._ended_at = 0.0  # the step before
        self._told_s = 0.0
        self._told_at = float("-inf")

    def beat(self) -> None:
        """Tell that the loop goes round, if the last word is old."""
        now = self._clock()
        if now - self._told_at >= BEAT_S:
            self._say(now, self._expected_s())

    def step_begins(self, prompt_tokens: int, computes: bool = True) -> None:
        """Call it before the step: on a CPU the step is computed while it is submitted."""
        now = self._clock()
        self._in_flight.append((now, prompt_tokens, computes))
        expected_s = self._expected_s()
        is_shorter = self._told_s > LONG_STEP_S and expected_s < self._told_s / 2
        if expected_s > max(self._told_s, LONG_STEP_S) or is_shorter:
            self._say(now, expected_s)

    def step_ended(self, step_s: float | None = None) -> None:
        """The oldest step in flight is done, and took so long; None: from its beginning, or the end before, to now."""
        began_at, prompt_tokens, computes = self._in_flight.popleft()
        now = self._clock()
        took_s = now - max(began_at, self._ended_at) if step_s is None else step_s
        if computes:
            self._times.note(prompt_tokens, took_s, LONG_STEP_S)
        self._ended_at = now

    def _expected_s(self) -> float:
        return max((self._times.expected_s(tokens) for _, tokens, _ in self._in_flight), default=0.0)

    def _say(self, now: float, expected_s: float) -> None:
        self._told_s, self._told_at = expected_s, now
        self._tell(expected_s)
