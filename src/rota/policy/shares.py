"""Shares count what adapters of different weights have got, so that tokens come in the proportion of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from rota.core.ids import AdapterId
from rota.policy.views import AdapterView

# An adapter makes room once it is this many of its steps ahead of an adapter that is behind.
STEPS_AHEAD = 16


class Shares:
    """By adapter: tokens so far, and tokens for each unit of weight. Empty while all weights are equal."""

    def __init__(self) -> None:
        self._served: dict[AdapterId, tuple[int, float]] = {}
        self._largest = 1.0

    def __bool__(self) -> bool:
        return bool(self._served)

    def count(self, views: Sequence[AdapterView]) -> bool:
        """Look at all adapters with work; False if their weights are equal, and nothing is counted.

        An adapter whose work came a moment ago begins where the adapter that has got least stands: time without work
        earns nothing.
        """
        weights = {view.weight for view in views}
        known, self._served = self._served, {}
        if len(weights) < 2:
            return False
        self._largest = max(weights)
        least = min((served for _, served in known.values()), default=0.0)
        for view in views:
            tokens, served = known.get(view.adapter_id, (view.attained, least))
            self._served[view.adapter_id] = (view.attained, served + (view.attained - tokens) / view.weight)
        return True

    @property
    def merits(self) -> dict[AdapterId, float]:
        """The adapter that has got least for its weight has the largest merit."""
        return {adapter_id: -served for adapter_id, (_, served) in self._served.items()}

    def margin(self, view: AdapterView) -> float:
        return STEPS_AHEAD * view.running / view.weight

    def rarity(self, view: AdapterView) -> float:
        """How much longer than the heaviest adapter this one goes without a turn."""
        return self._largest / view.weight if self._served else 1.0
