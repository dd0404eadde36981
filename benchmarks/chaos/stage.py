"""On the stage faults act: they find the site, the server and its clients here, and write into one ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from .asks import Ask, Manner, drawn_ask, encoded
from .endings import Ending, Kind
from .exchange import exchange, fetch
from .ledger import Allowed, Ledger
from .served import NotServingError, Served
from .site import ADAPTERS, BASE, MODELS, OPERATOR, Site, TenantAdapter


@dataclass(slots=True)
class Stage:
    """Everything here runs on one event loop."""

    site: Site
    served: Served
    ledger: Ledger
    requests: int = 6  # of ordinary clients in a round
    allowed: Allowed = field(default_factory=Allowed)
    _open: list[asyncio.Task[Ending]] = field(default_factory=list)
    _names: int = 0

    async def ask(self, ask: Ask) -> Ending:
        """Send an ask, and write its ending down."""
        self.ledger.sent += 1
        await asyncio.sleep(ask.delay_s)  # the client comes when it was drawn to come
        ending = await exchange(self.served.port, ask)
        self.ledger.note_ending(ask, ending, self.allowed)
        return ending

    def begin(self, asks: Iterable[Ask]) -> list[asyncio.Task[Ending]]:
        """Send asks beside whatever else happens; the round waits for all of them."""
        tasks = [asyncio.create_task(self.ask(ask)) for ask in asks]
        self._open += tasks
        return tasks

    async def finish(self) -> None:
        """Wait for every ask of the round."""
        open, self._open = self._open, []
        await asyncio.gather(*open)

    def traffic(self, rng: Random, count: int, manner: Manner | None = None, most_tokens: int = 16) -> list[Ask]:
        """Ordinary requests of all keys."""
        return [self.drawn(rng, rng.choice(list(MODELS)), manner or Manner(), most_tokens) for _ in range(count)]

    def drawn(self, rng: Random, key: str, manner: Manner | None = None, most_tokens: int = 16) -> Ask:
        self._names += 1
        name = f"chaos-{self.ledger.round}-{self._names}"
        model = self.site.model_for(rng, key)
        return drawn_ask(rng, self.site.secrets[key], model, name, most_tokens, manner or Manner())

    def large_bodies(self, turns: int, may_get: frozenset[int] = frozenset()) -> list[Ask]:
        """Conversations of very many turns, of two keys at a time."""
        body = encoded({"model": BASE, "messages": [{"role": "user", "content": "a"}] * turns})
        secrets = [self.site.secrets[key] for key in ("acme", "beta")]
        return [Ask("/tokenize", secret, body, may_get=may_get) for secret in secrets]

    def load(
        self,
        adapter: TenantAdapter,
        may_get: frozenset[int] = frozenset(),
        name: str | None = None,
        folder: Path | None = None,
    ) -> Ask:
        """Its tenant's call; with another name, or from another folder."""
        body = {"lora_name": name or adapter.name, "lora_path": str(folder or self.site.folder_of(adapter))}
        secret = self.site.secrets[adapter.tenant]
        return Ask("/v1/load_lora_adapter", secret, encoded(body), may_get=may_get)

    def unload(self, adapter: TenantAdapter, may_get: frozenset[int] = frozenset(), name: str | None = None) -> Ask:
        body = encoded({"lora_name": name or adapter.name})
        return Ask("/v1/unload_lora_adapter", self.site.secrets[adapter.tenant], body, may_get=may_get)

    async def read(self, path: str) -> bytes:
        """What the operator sees. Raises NotServingError if there is no such answer."""
        ask = Ask(path, self.site.secrets[OPERATOR])
        ending, body = await fetch(self.served.port, ask)
        if ending.kind is not Kind.FINISHED:
            raise NotServingError(f"{path} answered the operator with {ending.outcome}: {ending.detail}")
        return body

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.read("/server_info"))
        return found

    async def settle(self) -> None:
        """The server is ready again, and every tenant has its adapters. Raises NotServingError if that fails."""
        self.allowed = Allowed()
        if self.served.exit_code is not None:
            await self.served.start()
        await self.served.wait_until_ready()
        loaded = (await self.info())["loaded_adapters"]
        for adapter in ADAPTERS:
            if adapter.name not in loaded:
                self.site.restore(adapter)
                await self.ask(self.load(adapter))
