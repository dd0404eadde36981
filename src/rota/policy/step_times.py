"""Step times say how long steps take, as measured.

A step takes as long as its decodes alone, and a little longer for every token of a prompt:

    seconds |            /     a few tokens may take as long as one, so a short step says
            |       ____/      little of a long one: it may lower what a token is taken to
            |  ____/           cost, and only long steps raise it
            +-----------------
                 tokens of prompts
"""

from __future__ import annotations

from collections import deque

from rota.core.capacity import Capacity

# The median of this many measurements counts: one that is far off (a stopped process, the first use of a shape) does
# not, and two are a change.
REMEMBERED = 3


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

    def __init__(self, decodes_s: float = 0.0, token_s: float = 0.0) -> None:
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
            token_s = max(token_s, min(whole_s / 2, self.token_s or whole_s))
        if is_long or token_s < self.token_s:
            self._token.note(token_s)
