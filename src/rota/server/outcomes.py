"""Outcomes are what the engine says of adapters, for those who wait for it."""

from __future__ import annotations

import asyncio

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
        outcome = self._waiting.pop(adapter_id, None)
        if outcome and not outcome.done():  # else the client has left
            outcome.set_result(reason)
