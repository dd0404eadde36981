"""Eviction says which of the adapters that may leave their slot leaves first."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from rota.core.ids import AdapterId


class Eviction:
    """Is told which adapters are used and which are gone; says which one leaves next.

    `lru`: the adapter that was unused for longest leaves first. `fifo`: the one that came first, however often it was
    used.
    """

    def __init__(self, policy: Literal["lru", "fifo"]) -> None:
        self._is_use_counted = policy == "lru"
        self._order: dict[AdapterId, None] = {}  # a dict keeps order: the first to leave comes first

    def use(self, adapter_id: AdapterId) -> None:
        if self._is_use_counted:
            self._order.pop(adapter_id, None)
        self._order[adapter_id] = None

    def forget(self, adapter_id: AdapterId) -> None:
        self._order.pop(adapter_id, None)

    def choose(self, candidates: Collection[AdapterId]) -> AdapterId:
        return next(adapter_id for adapter_id in self._order if adapter_id in candidates)
