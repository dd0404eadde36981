"""Observers hear what happens beside the clients; one that fails is logged once and never holds back a token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rota.core.events import Event
from rota.core.request import Request
from rota.observe.observer import Observer

LOG = logging.getLogger("rota.server")

Hear = Callable[[list[Event]], None]


class Observers:
    """Observers hear every request and event, listeners every event."""

    def __init__(self, observers: Sequence[Observer] = (), listeners: Sequence[Hear] = ()) -> None:
        self._observers = observers
        self._hear: list[Hear] = [*(observer.observe for observer in observers), *listeners]
        self._failed: set[str] = set()

    def asked(self, request: Request) -> None:
        for observer in self._observers:
            try:
                observer.asked(request.request_id, request.adapter_id, request.arrived_at)
            except Exception as error:  # an observer that fails must not hold back a token
                self._note(observer.asked, error)

    def hear(self, events: list[Event]) -> None:
        for hear in self._hear:
            try:
                hear(events)
            except Exception as error:  # nor a listener
                self._note(hear, error)

    def _note(self, observer: Callable[..., None], error: Exception) -> None:
        name = getattr(observer, "__qualname__", repr(observer))
        if name not in self._failed:  # what fails once fails with every token
            self._failed.add(name)
            LOG.error("%s failed; what it tells may be wrong from here on.", name, exc_info=error)
