"""Promises are what a service owes: an end of every request, a result for every adapter, adapters that stay, and peace
while it is paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
    HostState,
)
from rota.core.ids import FIRST_ENGINE, AdapterId, EngineId, RequestId
from rota.core.messages import AddAdapter, Message, Pause, RemoveAdapter, Resume, SealAdapter
from rota.core.request import Request

Judged = Callable[[AddAdapter], AddAdapter]


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
        self._leaving: dict[AdapterId, Adapter | None] = {}
        self._known: dict[AdapterId, Adapter] = {}
        self._reading: set[AdapterId] = set()
        self._is_paused = False

    def note_message(self, message: Message) -> None:
        match message:
            case Request(request_id=request_id, adapter_id=adapter_id, prompt=prompt):
                self._requests[request_id] = _Open(adapter_id, len(prompt))
            case AddAdapter(adapter=adapter, is_known=is_known):
                (self._known if is_known else self._coming)[adapter.adapter_id] = adapter
            case RemoveAdapter(adapter_id=adapter_id):
                self._leaving[adapter_id] = self._known.pop(adapter_id, None) or self._coming.get(adapter_id)
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
                case HostChanged():
                    self._note_read(event)

    def _note_read(self, event: HostChanged) -> None:
        (self._reading.add if event.state is HostState.READING else self._reading.discard)(event.adapter_id)
        if event.seals:
            self._seal(event.adapter_id, event.seals)

    def _seal(self, adapter_id: AdapterId, seals: tuple[str, ...]) -> None:
        """What the first read of a version has found is what the next engine must find."""
        for adapters in (self._coming, self._known):
            if (adapter := adapters.get(adapter_id)) and not adapter.seals:
                adapters[adapter_id] = replace(adapter, seals=seals)

    @property
    def reading(self) -> list[Adapter]:
        """The adapters that the engine reads. It says so before it begins, and may die of one."""
        leaving = {adapter_id: one for adapter_id, one in self._leaving.items() if one}
        every = self._coming | self._known | leaving
        return [every[adapter_id] for adapter_id in sorted(self._reading) if adapter_id in every]

    @property
    def served(self) -> set[AdapterId]:
        """The adapters of all requests that the engine has begun."""
        return {one.adapter_id for one in self._requests.values() if one.cached_tokens is not None}

    def introductions(self, judged: Judged = lambda message: message) -> list[AddAdapter | Pause]:
        """The first messages to a new engine: every adapter that was added and not removed, and a pause that lasts.

        Adapters with open requests come first: the new engine reads adapters in this order, and clients ask again.
        Those that are to be read alone, as `judged` says, come last.
        """
        now, in_use = time.monotonic(), {one.adapter_id for one in self._requests.values()}
        adapters = sorted(self._known.values(), key=lambda adapter: adapter.adapter_id not in in_use)
        known = [judged(AddAdapter(adapter=one, at=now, is_known=True, is_read_later=True)) for one in adapters]
        known.sort(key=lambda one: one.adapter.is_read_alone)
        return [*known, *([Pause(now)] if self._is_paused else [])]

    def break_all(self, reason: str, fault_of: Callable[[Adapter], Fault | None] = lambda _: None) -> list[Event]:
        """The engine is dead: end all open requests, and return the events that say so.

        Adapters that were being added are refused, by the fault of their own if they have one. Adapters that were being
        removed are removed with the engine.
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
        refused = [(one, fault_of(one) or fault) for one in self._coming.values()]
        # Of those that a new engine will refuse, clients need not wait for it to say so.
        refused += [(one, own) for one in self.reading if one.adapter_id in self._known and (own := fault_of(one))]
        for one, own in refused:
            refusal = AdapterRefused(adapter_id=one.adapter_id, at=now, reason=own.message, code=own.code)
            events.append(replace(refusal, engine_id=self._engine_id))
        events += [AdapterRemoved(adapter_id, now, self._engine_id) for adapter_id in self._leaving]
        self._requests, self._coming, self._leaving, self._reading = {}, {}, {}, set()
        return events
