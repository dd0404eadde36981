"""First asks tell a replica of an adapter with the first request for it: for fleets where telling all would take long.

Ten thousand adapters on 512 replicas are five million reads before the first request, and as many records. A replica
that is told late reads the adapter when it is asked for, as it does live if host memory has lost it since the start.
"""

from __future__ import annotations

from dataclasses import replace

from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter


class FirstAsks:
    """Which replicas know which adapters."""

    def __init__(self) -> None:
        self._expected: dict[AdapterId, AddAdapter] = {}
        self._told: set[tuple[int, AdapterId]] = set()

    def expect(self, message: AddAdapter) -> None:
        """An adapter may be asked for from now on."""
        self._expected[message.adapter.adapter_id] = message

    def note(self, replica: int, adapter_id: AdapterId, at: float) -> AddAdapter | None:
        """A request goes to a replica, which must be sent this message before."""
        if adapter_id not in self._expected or (replica, adapter_id) in self._told:
            return None
        self._told.add((replica, adapter_id))
        return replace(self._expected[adapter_id], at=at)
