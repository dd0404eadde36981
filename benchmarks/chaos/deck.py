"""A deck deals faults in a random order in which every fault comes equally often."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from .faults import FAULTS, Ends, Fault

# The first part of a run has every fault. Then the server lives on, and in the second half also the engine, so that
# what they hold after a long time can be compared.
SERVER_LIVES_FROM, ENGINE_LIVES_FROM = 0.25, 0.5


class Deck:
    """The order depends on the seed alone: which faults are passed over depends on how far the run is."""

    def __init__(self, rng: Random, names: Sequence[str] = ()) -> None:
        self._rng = rng
        self._faults = [FAULTS[name] for name in names or FAULTS]
        self._left: list[Fault] = []

    def deal(self, progress: float) -> Fault:
        """The next fault that may come after this share of the run. A deck of faults that may not is dealt anyway."""
        for _ in range(2 * len(self._faults)):
            if not self._left:
                self._left = self._rng.sample(self._faults, len(self._faults))
            fault = self._left.pop()
            if fault.ends <= _most(progress):
                break
        return fault


def _most(progress: float) -> Ends:
    if progress < SERVER_LIVES_FROM:
        return Ends.SERVER
    return Ends.ENGINE if progress < ENGINE_LIVES_FROM else Ends.NOTHING
