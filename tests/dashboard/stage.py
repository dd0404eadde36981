"""A server on a fake device with a dashboard, and traffic for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.lora_paths import LoraPath
from rota.core.messages import AdapterFetched, Message
from rota.core.policy_config import PolicyConfig
from rota.dashboard.feed import Feed
from rota.dashboard.routes import Viewers, connect, keep_history, routes_of
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.text.tokenizer import Tokenizer
from tests.builders import capacity
from tests.fakes import FakeDevice, NextToken, alphabet
from tests.runtime.services import LONG
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

NAMES = ("pirate", "haiku", "french", "json", "bullets", "refusal")


@dataclass
class Stage:
    """What a test needs to hold: where the server is, and what stands behind it."""

    url: str
    service: EngineClient
    registry: Registry
    viewers: Viewers
    pool: ThreadPoolExecutor

    def ask(self, model: str, tokens: int = 40, key: str = "") -> None:
        """A request in the background."""
        body = {"model": model, "prompt": f"to {model}", "max_tokens": tokens, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.pool.submit(httpx.post, f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S, headers=headers)

    def ask_everybody(self, tokens: int = 40) -> None:
        for name in ("letters", *NAMES):
            self.ask(name, tokens)


class RankedDevice(FakeDevice):
    """Its adapters have ranks."""

    def fetch(self, adapter: Adapter) -> Message:
        fetched = super().fetch(adapter)
        return replace(fetched, rank=8 << adapter.adapter_id % 3) if isinstance(fetched, AdapterFetched) else fetched


def roomy(rows: int = 24, slots: int = 2) -> Capacity:
    """Room for answers of LONG tokens, which nobody reads to their end."""
    return capacity(rows=rows, blocks=rows * LONG // 16, slots=slots, max_sequence_tokens=2 * LONG)


@contextmanager
def stage(
    folder: Path,
    policy: PolicyConfig | None = None,
    keys: dict[str, Key] | None = None,
    room: Capacity | None = None,
    step_s: float = 0.004,
    journal_dir: Path | None = None,
    names: tuple[str, ...] = NAMES,
    replicas: int = 1,
    next_token: NextToken = alphabet,
    model: str = "letters",
) -> Iterator[Stage]:
    """Six adapters on two slots, steps of a few milliseconds."""
    device = RankedDevice(room or roomy(), step_s=step_s, next_token=next_token)
    registry = Registry(model, str(folder))
    adapters: list[Adapter] = [registry.add(LoraPath(name=name, path=f"adapters/{name}")) for name in names]
    inner = engines(lambda: device, EngineConfig(policy=policy or PolicyConfig()), replicas)
    service = EngineClient(inner, adapters)
    ring = KeyRing({digest_of(secret): key for secret, key in (keys or {}).items()})
    access = Access(registry, ring)
    feed = Feed(registry, lambda: service.state, (policy or PolicyConfig()).reader_pace)
    viewers = Viewers(feed, service.send)
    tokenizer = Tokenizer(write_byte_tokenizer(folder))
    page = routes_of(viewers, str(journal_dir) if journal_dir else None)
    told: dict[str, Any] = {
        "watchers": [feed],
        "on_error": feed.note_error,
        "service_tasks": [partial(keep_history, feed)],
    }
    app = made_app(service, tokenizer, registry, access, more_routes=page, **told)
    connect(feed, app.state.context)
    with ThreadPoolExecutor(64) as pool, running(app) as url:
        service.wait_until_ready()
        try:
            yield Stage(url, service, registry, viewers, pool)
        finally:
            service.stop()  # so that whoever is still open need not be waited for


def breaks_at_forty(tokens: Sequence[int]) -> int:
    if len(tokens) > 40:
        raise ZeroDivisionError("a kernel went wrong")
    return alphabet(tokens)
