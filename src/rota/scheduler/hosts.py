"""The host ledger knows which adapters lie in host memory, from where they can be copied to the device."""

from __future__ import annotations

from collections.abc import Collection

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId


class HostLedger:
    """Bounded: an adapter on its way takes as much room as an adapter in host memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[AdapterId, None] = {}  # longest unused first
        self._fetching: set[AdapterId] = set()
        self._far: set[AdapterId] = set()  # of these, those that come from sources
        self._alone: AdapterId | None = None  # it is on its way, and no other is to be beside it

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

    def reads_like(self, is_far: bool) -> int:
        """How many are on their way from sources, or else from the disk."""
        return len(self._far) if is_far else len(self._fetching) - len(self._far)

    @property
    def held(self) -> Collection[AdapterId]:
        """The adapters in host memory; the adapter that was unused for longest comes first."""
        return self._held.keys()

    def has(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._held

    def is_fetching(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._fetching

    def use(self, adapter_id: AdapterId) -> None:
        if adapter_id in self._held:
            del self._held[adapter_id]
            self._held[adapter_id] = None

    def lets_read(self, adapter: Adapter) -> bool:
        """Whether this adapter may be on its way beside those that are."""
        return self._alone is None and not (adapter.is_read_alone and self._fetching)

    def begin_fetch(self, adapter: Adapter) -> None:
        """One more adapter is on its way; the caller has made room."""
        assert not self.is_full
        assert self.lets_read(adapter)
        self._fetching.add(adapter.adapter_id)
        if adapter.is_far:
            self._far.add(adapter.adapter_id)
        if adapter.is_read_alone:
            self._alone = adapter.adapter_id

    def finish_fetch(self, adapter_id: AdapterId) -> None:
        self._end_fetch(adapter_id)
        self._held[adapter_id] = None

    def forget(self, adapter_id: AdapterId) -> None:
        self._end_fetch(adapter_id)
        self._held.pop(adapter_id, None)

    def _end_fetch(self, adapter_id: AdapterId) -> None:
        self._fetching.discard(adapter_id)
        self._far.discard(adapter_id)
        if self._alone == adapter_id:
            self._alone = None
