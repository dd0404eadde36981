"""Transient adapters come while others are served: each is loaded, asked and unloaded again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.core.ids import AdapterId
from rota.workload.arrivals import Ask, asks
from rota.workload.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A copy of `host` under another name comes at `at`; it is unloaded after `stays_s`, answered or not.

    The moments of its requests count from its own arrival.
    """

    number: int
    at: float
    host: AdapterId
    asks: tuple[Ask, ...]
    stays_s: float


def visits(scenario: Scenario, seed: int) -> Iterator[Visit]:
    """A scenario's transient adapters in order; their requests are like those of its first client with adapters."""
    if not scenario.transients:
        return
    client = next(client for client in scenario.clients if client.adapters)
    each, every_s, stays_s = scenario.transient_requests, scenario.transient_every_s, scenario.transient_stays_s
    if stays_s is None:
        stays_s = every_s / 2.0
    host = replace(
        client,
        requests=scenario.transients * each,
        rate_per_s=1.0,
        burst=1,
        concurrency=None,
        distribution="distinct",
        base_share=0.0,
    )
    own: list[Ask] = []
    for ask in asks(host, seed):
        own.append(replace(ask, at=stays_s * len(own) / each))
        if len(own) == each:
            number = ask.number // each
            yield Visit(
                number=number,
                at=(number + 1) * every_s,
                host=own[0].adapter_id,
                asks=tuple(own),
                stays_s=stays_s,
            )
            own = []
