"""Observers get every request and event; an observer that fails is logged once and never delays a token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rota.core.events import Event
from rota.core.request import Request
from rota.observe.observer import Observer

LOG = logging.getLogger("rota.server")

Listener = Callable[[list[Event]], None]


class Observers:
    """Observers get every request and event. Listeners get every event."""

    def __init__(self, observers: Sequence[Observer] = (), listeners: Sequence[Listener] = ()) -> None:
        self._observers = observers
        self._listeners: list[Listener] = [*(observer.observe for observer in observers), *listeners]
        self._failed: set[str] = set()

    def asked(self, request: Request) -> None:
        for observer in self._observers:
            try:
                observer.asked(request.request_id, request.adapter_id, request.arrived_at, request.tenant.name)
            # Broad: an error in an observer, of any kind, must not keep a request from the engine.
            except Exception as error:
                self._note(observer.asked, error)

    def observe(self, events: list[Event]) -> None:
        for listener in self._listeners:
            try:
                listener(events)
            # Broad: an error in a listener, of any kind, must not keep tokens from clients.
            except Exception as error:
                self._note(listener, error)

    def _note(self, observer: Callable[..., None], error: Exception) -> None:
        name = getattr(observer, "__qualname__", repr(observer))
        if name not in self._failed:  # an observer that failed once fails with every token
            self._failed.add(name)
            LOG.error("%s failed; its figures may be wrong from here on.", name, exc_info=error)
