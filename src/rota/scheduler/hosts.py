"""The host ledger knows which adapters lie in host memory, from where they can be copied to the device."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rota.core.ids import AdapterId

# What is lost if an adapter is dropped: first the kind of loss, then how soon the adapter would have to be read again.
Price = tuple[int, float]
NO_PRICE: Price = (0, 0.0)


class HostLedger:
    """Bounded: an adapter on its way takes as much room as an adapter in host memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[AdapterId, None] = {}  # longest unused first
        self._fetching: set[AdapterId] = set()

    @property
    def is_full(self) -> bool:
        return len(self._held) + len(self._fetching) >= self._most

    @property
    def known(self) -> int:
        """How many adapters are in host memory, or on their way there."""
        return len(self._held) + len(self._fetching)

    @property
    def reads(self) -> int:
        """How many adapters are on their way."""
        return len(self._fetching)

    @property
    def held(self) -> Collection[AdapterId]:
        """The adapters in host memory; the adapter that was unused for longest comes first."""
        return self._held.keys()

    def has(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._held

    def is_fetching(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._fetching

    def cheapest(self, cost: Callable[[AdapterId], Price | None]) -> AdapterId | None:
        """The adapter that costs least to drop, among equals the longest unused; a cost of None forbids it."""
        best: AdapterId | None = None
        least = NO_PRICE
        for adapter_id in self._held:
            price = cost(adapter_id)
            if price is not None and (best is None or price < least):
                best, least = adapter_id, price
                if price == NO_PRICE:
                    break
        return best

    def use(self, adapter_id: AdapterId) -> None:
        if adapter_id in self._held:
            del self._held[adapter_id]
            self._held[adapter_id] = None

    def begin_fetch(self, adapter_id: AdapterId) -> None:
        """One more adapter is on its way; the caller has made room."""
        assert not self.is_full
        self._fetching.add(adapter_id)

    def finish_fetch(self, adapter_id: AdapterId) -> None:
        self._fetching.discard(adapter_id)
        self._held[adapter_id] = None

    def forget(self, adapter_id: AdapterId) -> None:
        self._fetching.discard(adapter_id)
        self._held.pop(adapter_id, None)
