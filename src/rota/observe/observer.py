"""An observer is told what was asked and what became of it, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rota.core.events import Event
from rota.core.ids import AdapterId, RequestId


class Observer(Protocol):
    """Summaries, journals and pictures are made by observers."""

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float) -> None:
        """Somebody asks at `at`; a simulation may tell this a little ahead of its time."""
        ...

    def observe(self, events: Iterable[Event]) -> None: ...
