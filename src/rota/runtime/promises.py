"""Promises are what a service owes: an end to every request, a word on every adapter, and adapters that stay known."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event, Finished, FinishReason
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import AddAdapter, Message, RemoveAdapter, Submit


class Promises:
    """Made by messages, kept by events; whoever calls holds a lock."""

    def __init__(self) -> None:
        # When each was made, the oldest first.
        self._requests: dict[RequestId, float] = {}
        self._coming: dict[AdapterId, Adapter] = {}
        self._leaving: dict[AdapterId, None] = {}
        self._known: dict[AdapterId, Adapter] = {}

    def note_message(self, message: Message) -> None:
        match message:
            case Submit(request):
                self._requests[request.request_id] = time.monotonic()
            case AddAdapter(adapter):
                self._coming[adapter.adapter_id] = adapter
            case RemoveAdapter(adapter_id):
                self._leaving[adapter_id] = None
                self._known.pop(adapter_id, None)

    def note_events(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Finished(request_id):
                    self._requests.pop(request_id, None)
                case AdapterAdded(adapter_id):
                    adapter = self._coming.pop(adapter_id, None)
                    if adapter and adapter_id not in self._leaving:
                        self._known[adapter_id] = adapter
                case AdapterRefused(adapter_id):
                    self._coming.pop(adapter_id, None)
                    self._known.pop(adapter_id, None)
                    self._leaving.pop(adapter_id, None)
                case AdapterRemoved(adapter_id):
                    self._leaving.pop(adapter_id, None)

    def oldest_at(self) -> float:
        """Since when the oldest open request is open; infinity if none is."""
        return next(iter(self._requests.values()), math.inf)

    def introductions(self) -> list[AddAdapter]:
        """What a new engine must be told first: every adapter that was added and not removed."""
        return [AddAdapter(adapter, time.monotonic()) for adapter in self._known.values()]

    def break_all(self, reason: str) -> list[Event]:
        """The engine is gone: end what is open; gives the events that say so.

        Adapters on their way in are refused, those on their way out went with the engine.
        """
        now = time.monotonic()
        fault = Fault(FaultCode.ENGINE_DIED, reason)
        events: list[Event] = [Finished(one, now, FinishReason.FAILED, fault=fault) for one in self._requests]
        events += [AdapterRefused(adapter_id, now, reason) for adapter_id in self._coming]
        events += [AdapterRemoved(adapter_id, now) for adapter_id in self._leaving]
        self._requests, self._coming, self._leaving = {}, {}, {}
        return events
