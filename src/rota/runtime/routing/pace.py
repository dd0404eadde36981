"""Pace is how long steps take, and how much longer for each token: measured, the latest counting most."""

from __future__ import annotations

# What counts until something was measured.
FIRST_TOKEN_S, FIRST_STEP_S = 25e-6, 0.01
FEWEST_STEPS = 16
# A measurement counts half after about 350 steps, a second or more.
KEPT = 0.998
# A step always takes a while, however few tokens it has. Where the slope cannot be seen, because all steps are alike,
# it is taken to be this share of the mean.
LEAST_SHARE, UNSEEN_SHARE = 0.05, 0.25


class Pace:
    """A straight line through recent steps, tokens against seconds.

    What one more token adds is the line's slope. The mean would count the fixed part of a step as well, which a request
    that joins does not lengthen: most of a step, while few sequences run.
    """

    def __init__(self) -> None:
        self.token_s = FIRST_TOKEN_S
        self.step_s = FIRST_STEP_S
        self._steps = 0.0  # the sums below are of this many steps
        self._tokens = 0.0
        self._seconds = 0.0
        self._squares = 0.0
        self._products = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of this many tokens took so long."""
        self._steps = self._steps * KEPT + 1.0
        self._tokens = self._tokens * KEPT + tokens
        self._seconds = self._seconds * KEPT + seconds
        self._squares = self._squares * KEPT + tokens * tokens
        self._products = self._products * KEPT + tokens * seconds
        if self._steps >= FEWEST_STEPS:
            self.step_s = self._seconds / self._steps
            self.token_s = self._slope()

    def _slope(self) -> float:
        if not self._tokens:
            return FIRST_TOKEN_S
        mean_s = self._seconds / self._tokens
        spread = self._squares - self._tokens * self._tokens / self._steps
        if spread <= self._steps:  # less than a token in a step
            return mean_s * UNSEEN_SHARE
        slope = (self._products - self._tokens * self._seconds / self._steps) / spread
        return min(mean_s, max(mean_s * LEAST_SHARE, slope))
