"""Transient adapters come while others are served: each is loaded, asked once and unloaded again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.core.ids import AdapterId
from rota.workload.arrivals import Ask, asks
from rota.workload.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Visit:
    """A copy of `host` under another name comes at `ask.at`; it is unloaded after `stays_s`, answered or not."""

    host: AdapterId
    ask: Ask
    stays_s: float


def visits(scenario: Scenario, seed: int) -> Iterator[Visit]:
    """A scenario's transient adapters in order; their requests are like those of its first client with adapters."""
    if not scenario.transients:
        return
    client = next(client for client in scenario.clients if client.adapters)
    host = replace(
        client, requests=scenario.transients, rate_per_s=1.0, concurrency=None, distribution="distinct", base_share=0.0
    )
    for ask in asks(host, seed):
        at = (ask.number + 1) * scenario.transient_every_s
        yield Visit(ask.adapter_id, replace(ask, at=at), scenario.transient_every_s / 2.0)
