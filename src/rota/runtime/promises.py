"""Promises are what a service owes: an end of every request, a result for every adapter, adapters that stay, and peace
while it is paused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Admitted,
    Event,
    Finished,
    FinishReason,
    HostChanged,
)
from rota.core.ids import FIRST_ENGINE, AdapterId, EngineId, RequestId
from rota.core.messages import AddAdapter, Message, Pause, RemoveAdapter, Resume, SealAdapter, Submit


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and what its end can say without the engine.

    The length of its answer is not here: the receiver of the tokens has counted them.
    """

    adapter_id: AdapterId
    prompt_tokens: int
    cached_tokens: int | None = None  # when it was first admitted


class Promises:
    """Made by messages, kept by events; callers hold a lock."""

    def __init__(self, engine_id: EngineId = FIRST_ENGINE) -> None:
        self._engine_id = engine_id
        self._requests: dict[RequestId, _Open] = {}
        self._coming: dict[AdapterId, Adapter] = {}
        self._leaving: dict[AdapterId, None] = {}
        self._known: dict[AdapterId, Adapter] = {}
        self._is_paused = False

    def note_message(self, message: Message) -> None:
        match message:
            case Submit(request):
                self._requests[request.request_id] = _Open(request.adapter_id, len(request.prompt))
            case AddAdapter(adapter=adapter, is_known=is_known):
                (self._known if is_known else self._coming)[adapter.adapter_id] = adapter
            case RemoveAdapter(adapter_id=adapter_id):
                self._leaving[adapter_id] = None
                self._known.pop(adapter_id, None)
            case SealAdapter(adapter_id, _, seals):
                self._seal(adapter_id, seals)
            case Pause() | Resume():
                self._is_paused = isinstance(message, Pause)

    def note_events(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Finished(request_id=request_id):
                    self._requests.pop(request_id, None)
                case Admitted(request_id=request_id, cached_tokens=cached_tokens):
                    if (one := self._requests.get(request_id)) and one.cached_tokens is None:
                        one.cached_tokens = cached_tokens
                case AdapterAdded(adapter_id):
                    adapter = self._coming.pop(adapter_id, None)
                    if adapter and adapter_id not in self._leaving:
                        self._known[adapter_id] = adapter
                case AdapterRefused(adapter_id=adapter_id):
                    # A known adapter that a new engine cannot read stays known: its folder may come back.
                    self._coming.pop(adapter_id, None)
                    self._leaving.pop(adapter_id, None)
                case AdapterRemoved(adapter_id):
                    self._leaving.pop(adapter_id, None)
                case HostChanged(adapter_id=adapter_id, seals=seals) if seals:
                    self._seal(adapter_id, seals)

    def _seal(self, adapter_id: AdapterId, seals: tuple[str, ...]) -> None:
        """What the first read of a version has found is what the next engine must find."""
        for adapters in (self._coming, self._known):
            if (adapter := adapters.get(adapter_id)) and not adapter.seals:
                adapters[adapter_id] = replace(adapter, seals=seals)

    def introductions(self) -> list[AddAdapter | Pause]:
        """The first messages to a new engine: every adapter that was added and not removed, and a pause that lasts.

        Adapters with open requests come first: the new engine reads adapters in this order, and clients ask again.
        """
        now, in_use = time.monotonic(), {one.adapter_id for one in self._requests.values()}
        adapters = sorted(self._known.values(), key=lambda adapter: adapter.adapter_id not in in_use)
        known = [AddAdapter(adapter=adapter, at=now, is_known=True, is_read_later=True) for adapter in adapters]
        return [*known, *([Pause(now)] if self._is_paused else [])]

    def break_all(self, reason: str) -> list[Event]:
        """The engine is dead: end all open requests, and return the events that say so.

        Adapters that were being added are refused. Adapters that were being removed are removed with the engine.
        """
        now = time.monotonic()
        fault = Fault(FaultCode.ENGINE_DIED, reason)
        events: list[Event] = [
            Finished(
                request_id=request_id,
                at=now,
                reason=FinishReason.FAILED,
                prompt_tokens=one.prompt_tokens,
                cached_tokens=one.cached_tokens or 0,
                fault=fault,
            )
            for request_id, one in self._requests.items()
        ]
        events += [
            AdapterRefused(adapter_id=adapter_id, at=now, reason=reason, engine_id=self._engine_id, code=fault.code)
            for adapter_id in self._coming
        ]
        events += [AdapterRemoved(adapter_id, now, self._engine_id) for adapter_id in self._leaving]
        self._requests, self._coming, self._leaving = {}, {}, {}
        return events
