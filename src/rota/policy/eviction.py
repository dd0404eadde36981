"""Eviction says which of the adapters that may leave their slot leaves first."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol

from rota.core.ids import AdapterId


class Eviction(Protocol):
    """Is told which adapters are used and which are gone; says which one leaves next."""

    def use(self, adapter_id: AdapterId) -> None: ...

    def forget(self, adapter_id: AdapterId) -> None: ...

    def choose(self, candidates: Collection[AdapterId]) -> AdapterId: ...


class LeastRecentlyUsed:
    """The adapter that was unused for longest leaves first."""

    def __init__(self) -> None:
        self._order: dict[AdapterId, None] = {}  # a dict keeps order: longest unused first

    def use(self, adapter_id: AdapterId) -> None:
        self._order.pop(adapter_id, None)
        self._order[adapter_id] = None

    def forget(self, adapter_id: AdapterId) -> None:
        self._order.pop(adapter_id, None)

    def choose(self, candidates: Collection[AdapterId]) -> AdapterId:
        return next(adapter_id for adapter_id in self._order if adapter_id in candidates)


class FirstInFirstOut(LeastRecentlyUsed):
    """The adapter that came first leaves first, however often it was used."""

    def use(self, adapter_id: AdapterId) -> None:
        self._order.setdefault(adapter_id)


def eviction(policy: Literal["lru", "fifo"]) -> Eviction:
    return LeastRecentlyUsed() if policy == "lru" else FirstInFirstOut()
