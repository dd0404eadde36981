"""The host ledger knows which adapters lie in host memory, ready to be copied to the device."""

from __future__ import annotations

from collections.abc import Callable

from rota.core.ids import AdapterId


class HostLedger:
    """Bounded; the adapter unused for longest makes room, one that has users only when no idle one exists."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[AdapterId, None] = {}  # longest unused first
        self._fetching: set[AdapterId] = set()

    def has(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._held

    def is_fetching(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._fetching

    def use(self, adapter_id: AdapterId) -> None:
        if adapter_id in self._held:
            del self._held[adapter_id]
            self._held[adapter_id] = None

    def begin_fetch(self, adapter_id: AdapterId, has_users: Callable[[AdapterId], bool]) -> AdapterId | None:
        """Make room for one more and note that it is on its way; gives who had to go."""
        self._fetching.add(adapter_id)
        if len(self._held) + len(self._fetching) <= self._most or not self._held:
            return None
        idle = (held for held in self._held if not has_users(held))
        victim = next(idle, None) or next(iter(self._held))
        del self._held[victim]
        return victim

    def finish_fetch(self, adapter_id: AdapterId) -> None:
        self._fetching.discard(adapter_id)
        self._held[adapter_id] = None

    def forget(self, adapter_id: AdapterId) -> None:
        self._fetching.discard(adapter_id)
        self._held.pop(adapter_id, None)
