"""The adapter manager loads and unloads adapters while the server runs, and waits for the result."""

from __future__ import annotations

import asyncio
import logging
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

# Most answers end within this time, and most clients wait longer.
PATIENCE_S = 30.0

LOG = logging.getLogger("rota.adapters")

# The result: empty after a success, else the reason.
Outcome = asyncio.Future[str]


class AdapterManager:
    """Loads and unloads adapters by name. Everything here runs on the event loop."""

    def __init__(self, service: Service, registry: Registry, patience_s: float = PATIENCE_S) -> None:
        self._service = service
        self._registry = registry
        self._patience_s = patience_s
        self._loading: dict[AdapterId, Outcome] = {}
        self._unloading: dict[AdapterId, Outcome] = {}
        self._served: set[AdapterId] = set()  # were added once

    @property
    def loaded(self) -> list[Adapter]:
        return self._registry.adapters

    async def load(self, asked: LoraPath) -> None:
        """Returns when the adapter can serve requests. Raises AdapterError with the reason if it cannot.

        The name of a lost adapter may be loaded again. If that fails, the name stays lost.
        """
        if (loss := self._registry.loss_of(asked.name)) is None:
            return await self._load(asked)
        lost = self._registry.forget(asked.name)
        try:
            await self._load(asked)
        except (AdapterError, RequestError):
            self._registry.lose(lost, loss)
            raise
        # The next engine must not try to read the old one too.
        self._service.send(RemoveAdapter(lost.adapter_id, time.monotonic()))

    async def _load(self, asked: LoraPath) -> None:
        adapter = self._registry.add(asked)
        try:
            self._service.send(AddAdapter(adapter=adapter, at=time.monotonic()))
        except RequestError:
            self._registry.forget(asked.name)
            raise
        if reason := await _future_for(self._loading, adapter):
            raise AdapterError(reason)
        if not self._registry.has(adapter):
            raise AdapterError(f"Adapter '{asked.name}' was unloaded before it was read.")

    async def unload(self, name: str) -> bool:
        """Refuse new requests for a name at once, then wait for its open ones. False: they outlast the wait."""
        adapter = self._registry.forget(name)
        self._service.send(RemoveAdapter(adapter.adapter_id, time.monotonic()))
        done, _ = await asyncio.wait([_future_for(self._unloading, adapter)], timeout=self._patience_s)
        return bool(done)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AdapterAdded(adapter_id):
                    self._served.add(adapter_id)
                    self._registry.recover(adapter_id)
                    _resolve(self._loading, adapter_id)
                case AdapterRefused(others_serve=True):
                    self._warn(event)
                case AdapterRefused(adapter_id=adapter_id, reason=reason):
                    self._refused(event)
                    _resolve(self._loading, adapter_id, reason)
                    _resolve(self._unloading, adapter_id)
                case AdapterRemoved(adapter_id):
                    self._served.discard(adapter_id)
                    _resolve(self._unloading, adapter_id)

    def _refused(self, event: AdapterRefused) -> None:
        """An engine reads adapters after its start, and the folder of one may be gone or its weights bad."""
        adapter_id = event.adapter_id
        adapter = self._registry.by_id(adapter_id)
        if adapter is None or adapter_id not in self._served:
            self._served.discard(adapter_id)
            self._registry.discard(adapter_id)
            return
        self._registry.lose(adapter, event.reason)
        self._warn(event)

    def _warn(self, event: AdapterRefused) -> None:
        adapter = self._registry.by_id(event.adapter_id)
        fields = {"adapter": adapter.name if adapter else "", "engine": event.engine_id, "why": event.reason}
        LOG.warning("An adapter could not be read.", extra={"fields": fields})


def _future_for(outcomes: dict[AdapterId, Outcome], adapter: Adapter) -> Outcome:
    """Called after the message is sent. Its answer comes through the event loop, so never before this call."""
    outcome = outcomes[adapter.adapter_id] = asyncio.get_running_loop().create_future()
    return outcome


def _resolve(outcomes: dict[AdapterId, Outcome], adapter_id: AdapterId, reason: str = "") -> None:
    outcome = outcomes.pop(adapter_id, None)
    if outcome and not outcome.done():  # else the client has left
        outcome.set_result(reason)
