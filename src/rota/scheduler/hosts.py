"""The host ledger knows which adapters lie in host memory, from where they can be copied to the device."""

from __future__ import annotations

from collections.abc import Collection

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId

# How long an adapter that engines died of is read alone.
ALONE_S = 10.0


class HostLedger:
    """Bounded: an adapter on its way takes as much room as an adapter in host memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[AdapterId, None] = {}  # longest unused first
        self._fetching: dict[AdapterId, tuple[Adapter, float]] = {}  # on their way, each since when
        self._is_awaited = False  # in this pass: one that is to be read alone waits for those that are on their way

    @property
    def is_full(self) -> bool:
        return self.known >= self._most

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
        return sum(adapter.is_far == is_far for adapter, _ in self._fetching.values())

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

    def begin_pass(self) -> None:
        self._is_awaited = False

    def lets_read(self, adapter: Adapter, now: float) -> bool:
        """Whether this adapter may be on its way beside those that are.

        While one that is to be read alone waits, no other begins, or its turn would never come. One that takes long,
        such as one from far away, keeps the others waiting for a while only.
        """
        alone_since = next((since for one, since in self._fetching.values() if one.is_read_alone), None)
        if alone_since is not None and now < alone_since + ALONE_S:
            return False
        if adapter.is_read_alone:
            self._is_awaited |= bool(self._fetching) and alone_since is None
            return not self._fetching
        return not self._is_awaited

    def begin_fetch(self, adapter: Adapter, now: float) -> None:
        """One more adapter is on its way; the caller has made room."""
        assert not self.is_full
        self._fetching[adapter.adapter_id] = (adapter, now)

    def finish_fetch(self, adapter_id: AdapterId) -> None:
        self._fetching.pop(adapter_id, None)
        self._held[adapter_id] = None

    def forget(self, adapter_id: AdapterId) -> None:
        self._fetching.pop(adapter_id, None)
        self._held.pop(adapter_id, None)
