"""Outcomes are what the engine says of adapters, for those who wait for it."""

from __future__ import annotations

import asyncio

from rota.core.errors import RotaError
from rota.core.ids import AdapterId

# Empty after a success, else the reason.
Outcome = asyncio.Future[str]


class Outcomes:
    """Of one kind: loads, or unloads. Everything here runs on the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[AdapterId, Outcome] = {}

    def of(self, adapter_id: AdapterId) -> Outcome:
        """Called after the message is sent. Its answer comes through the event loop, so never before this call."""
        outcome = self._waiting.get(adapter_id)
        if outcome is None or outcome.done():
            outcome = self._waiting[adapter_id] = asyncio.get_running_loop().create_future()
        return outcome

    def resolve(self, adapter_id: AdapterId, reason: str = "") -> None:
        if outcome := self._waited_for(adapter_id):
            outcome.set_result(reason)

    def fail(self, adapter_id: AdapterId, error: RotaError) -> None:
        """The engine cannot say. Whoever waits gets this error."""
        if outcome := self._waited_for(adapter_id):
            outcome.set_exception(error)

    def _waited_for(self, adapter_id: AdapterId) -> Outcome | None:
        outcome = self._waiting.pop(adapter_id, None)
        return outcome if outcome and not outcome.done() else None  # done: the client has left
