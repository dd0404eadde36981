"""The front of adapters: they come and go while the server serves, and whoever asked hears what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter, RemoveAdapter
from rota.runtime.registry import Registry
from rota.runtime.service import Service

# Most answers end sooner than that, and most clients wait longer.
PATIENCE_S = 30.0

# What became of it: empty if all went well, else the reason.
Outcome = asyncio.Future[str]


class AdapterFront:
    """Loads and unloads by name. Everything here runs on the event loop."""

    def __init__(self, service: Service, registry: Registry, patience_s: float = PATIENCE_S) -> None:
        self._service = service
        self._registry = registry
        self._patience_s = patience_s
        self._coming: dict[AdapterId, Outcome] = {}
        self._leaving: dict[AdapterId, Outcome] = {}

    @property
    def loaded(self) -> list[Adapter]:
        return self._registry.adapters

    async def load(self, asked: LoraPath) -> None:
        """Returns when requests for it are answered; raises AdapterError with the reason if they will not be."""
        adapter = self._registry.add(asked)
        try:
            self._service.send(AddAdapter(adapter, time.monotonic()))
        except RequestError:
            self._registry.forget(asked.name)
            raise
        if reason := await _expect(self._coming, adapter):
            raise AdapterError(reason)
        if not self._registry.has(adapter):
            raise AdapterError(f"Adapter '{asked.name}' was unloaded before it was read.")

    async def unload(self, name: str) -> bool:
        """Make a name unknown at once, then wait for its users; False: they outlast the patience, and it goes on."""
        adapter = self._registry.forget(name)
        self._service.send(RemoveAdapter(adapter.adapter_id, time.monotonic()))
        done, _ = await asyncio.wait([_expect(self._leaving, adapter)], timeout=self._patience_s)
        return bool(done)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AdapterAdded(adapter_id):
                    _resolve(self._coming, adapter_id)
                case AdapterRefused(adapter_id=adapter_id, reason=reason):
                    # Also one that was served before: a new engine reads it again, and its folder may be gone.
                    self._registry.discard(adapter_id)
                    _resolve(self._coming, adapter_id, reason)
                    _resolve(self._leaving, adapter_id)
                case AdapterRemoved(adapter_id):
                    _resolve(self._leaving, adapter_id)


def _expect(outcomes: dict[AdapterId, Outcome], adapter: Adapter) -> Outcome:
    """After the message is sent: its answer comes through the event loop, so not before this."""
    outcome = outcomes[adapter.adapter_id] = asyncio.get_running_loop().create_future()
    return outcome


def _resolve(outcomes: dict[AdapterId, Outcome], adapter_id: AdapterId, reason: str = "") -> None:
    outcome = outcomes.pop(adapter_id, None)
    if outcome and not outcome.done():  # else nobody waits for it any more
        outcome.set_result(reason)
