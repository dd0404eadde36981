"""Step times say how long steps take, as measured, and so how much of prompts fits into the time that a step may take.

A step takes as long as its decodes alone, and a little longer for every token of a prompt:

    seconds |            /     a few tokens may take as long as one, so a short step says
            |       ____/      little of a long one: it may lower what a token is taken to
            |  ____/           cost, and only long steps raise it
            +-----------------
                 tokens of prompts
"""

from __future__ import annotations

import math
from collections import deque

from rota.core.capacity import Capacity
from rota.core.config import SchedulerConfig

# The median of this many measurements counts: one that is far off (a stopped process, the first use of a shape) does
# not, and two are a change.
REMEMBERED = 3
# What 'auto' lets a step take: this many tokens' time, and between these bounds.
FEW_TOKENS = 4
LEAST_AUTO_S, MOST_AUTO_S = 0.05, 0.5
# Where decodes leave less of the time, prompts take a quarter of it nevertheless. And a step without decodes, for which
# no answer stands still, may take four times as long.
PART = 4
# However slow tokens are, prompts go on by so many a step.
LEAST_TOKENS = 8
# While every step has prompts, one in so many goes without, to see what decodes take alone.
MOST_UNSEEN = 64
# A step that takes so many times as long as it may counts at once, and until the next.
FAR_OVER = 2


class Recent:
    """The lower median of the last measurements; 0 while there is none."""

    __slots__ = ("_last", "median")

    def __init__(self, first: float = 0.0) -> None:
        self._last = deque([first] if first else (), REMEMBERED)
        self.median = first

    def note(self, value: float) -> None:
        self._last.append(value)
        self.median = sorted(self._last)[(len(self._last) - 1) // 2]


class StepTimes:
    """What decodes take, and what a token of a prompt adds."""

    def __init__(self, decodes_s: float, token_s: float = 0.0) -> None:
        """The device's own measurements, to begin with; 0: it has none."""
        self._decodes, self._token = Recent(decodes_s), Recent(token_s)

    @classmethod
    def of(cls, capacity: Capacity) -> StepTimes:
        """As an engine found them at its start."""
        return cls(capacity.decode_s, capacity.token_s)

    @property
    def decodes_s(self) -> float:
        """A step of decodes alone; 0 if none was seen."""
        return self._decodes.median

    @property
    def token_s(self) -> float:
        """Each token of a prompt; 0 if it is not known."""
        return self._token.median

    def expected_s(self, tokens: float) -> float:
        """A step with so many tokens of prompts."""
        return self.decodes_s + tokens * self.token_s

    def note(self, tokens: float, step_s: float, long_s: float) -> bool:
        """A step has taken so long; one of `long_s` is a long one. True if it says what decodes take alone."""
        is_plain = not tokens or step_s < self.decodes_s
        if is_plain:
            self._decodes.note(step_s)
        if tokens:
            self._note_token((step_s - self.decodes_s) / tokens, step_s / tokens, step_s >= long_s)
        return is_plain

    def _note_token(self, token_s: float, whole_s: float, is_long: bool) -> None:
        if token_s < self.token_s or not self.token_s:
            # Decodes may have become quicker meanwhile, so half of the step, at least, counts as the prompts'.
            token_s = max(token_s, min(whole_s / 2, self.token_s / 2 or whole_s))
        if is_long or token_s < self.token_s:
            self._token.note(token_s)


class StepBudget:
    """How much of prompts a step takes in. Tokens behind a prefix count for more, as `prefill_budget.work_of` says."""

    def __init__(self, asked_s: float | None, times: StepTimes) -> None:
        """`asked_s` is what a step may take; None: as long as a few tokens."""
        self._asked_s = asked_s
        self._times = times
        self._decodes = 1 if times.decodes_s else 0  # how many there were when their time was seen
        self._unseen = 0  # steps since then
        self._most = math.inf  # work, if the step before took far too long

    @classmethod
    def of(cls, config: SchedulerConfig, capacity: Capacity) -> StepBudget | None:
        """None on a device that is not known, such as a simulator's: there 'auto' is no limit."""
        if config.max_step_ms == "auto":
            return cls(None, StepTimes.of(capacity)) if capacity.device else None
        return cls(config.max_step_ms / 1000.0, StepTimes.of(capacity))

    @property
    def limit_s(self) -> float:
        """What a step may take."""
        if self._asked_s is not None:
            return self._asked_s
        return min(MOST_AUTO_S, max(LEAST_AUTO_S, FEW_TOKENS * self._times.decodes_s))

    def most_work(self, decodes: int) -> float:
        """The tokens of prompts that a step beside so many decodes has time for; infinity while that is not known."""
        if not self._times.token_s:
            return math.inf
        tokens = (self._allowed_s(decodes) - self._times.decodes_s) / self._times.token_s
        return max(float(LEAST_TOKENS), _whole(min(tokens, self._most)))

    def _allowed_s(self, decodes: int) -> float:
        limit_s, decodes_s = self.limit_s if decodes else PART * self.limit_s, self._times.decodes_s
        return max(limit_s, decodes_s + max(limit_s, decodes_s) / PART)

    def wants_a_look(self, decodes: int) -> bool:
        """Shall a step go without prompts, because it is not known what so many decodes take?"""
        return decodes > 2 * self._decodes or (decodes > 0 and self._unseen >= MOST_UNSEEN)

    def looks(self, decodes: int) -> None:
        """A step goes without prompts."""
        self._decodes, self._unseen = decodes, 0

    def note(self, decodes: int, work: float, step_s: float) -> None:
        """A step with so many decodes and so much of prompts has taken so long."""
        if not decodes and not work:
            return
        self._unseen += 1
        if work:
            allowed_s = self._allowed_s(decodes)
            self._most = work * allowed_s / step_s if step_s > FAR_OVER * allowed_s else math.inf
        if self._times.note(work, step_s, self.limit_s / 2) and decodes:
            self.looks(decodes)


def _whole(tokens: float) -> float:
    """Rounded down to one of four sizes between two powers of two: what is measured is then of few sizes."""
    size = int(min(tokens, 2.0**31))
    return size >> (shift := max(0, size.bit_length() - 3)) << shift
