"""An observer is told of every request and every event, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rota.core.events import Event
from rota.core.ids import AdapterId, RequestId


class Observer(Protocol):
    """Observers make summaries, journals, metrics and pictures."""

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str = "") -> None:
        """A request arrives at `at`; a simulation may say so a little before that time. A sole tenant has no name."""
        ...

    def observe(self, events: Iterable[Event]) -> None: ...
