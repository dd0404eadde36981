"""Arrivals turn a client and a seed into requests, the same ones every time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.core.ids import BASE, AdapterId
from rota.workload.scenario import Client, HeavyTail, Lengths, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A future request: `at` counts from the start; in a closed loop it is 0."""

    number: int
    at: float
    adapter_id: AdapterId
    prompt_tokens: int
    output_tokens: int
    leaves_after_s: float | None = None
    priority: int = 0
    shared_tokens: int = 0  # of the prompt's first tokens, those that the client's other prompts have too
    max_tokens: int | None = None  # the limit that the request names; None: the length of the answer


def asks(client: Client, seed: int) -> Iterator[Arrival]:
    """A client's requests in order."""
    dice = random.Random(seed)
    weights = list(itertools.accumulate(_weights(client)))
    at = client.starts_after_s
    for number in range(client.requests):
        if client.rate_per_s is not None and number % client.burst == 0:
            at += dice.expovariate(client.rate_per_s / client.burst)
        adapter = BASE
        if client.adapters and dice.random() >= client.base_share:
            if client.distribution == "distinct":
                index = number % client.adapters
            else:
                index = dice.choices(range(client.adapters), cum_weights=weights)[0]
            adapter = AdapterId(client.first_adapter + index)
        leaves_after_s = dice.uniform(0.0, client.cancel_within_s) if dice.random() < client.cancel_share else None
        prompt_tokens = _length(client.prompt_tokens, dice)
        yield Arrival(
            number=number,
            at=at,
            adapter_id=adapter,
            prompt_tokens=prompt_tokens,
            output_tokens=_length(client.output_tokens, dice),
            leaves_after_s=leaves_after_s,
            priority=client.priority,
            shared_tokens=min(client.shared_prefix_tokens, prompt_tokens),
            max_tokens=client.max_tokens,
        )


def _length(lengths: Lengths, dice: random.Random) -> int:
    return lengths.draw(dice) if isinstance(lengths, HeavyTail) else dice.randint(*lengths)


def _weights(client: Client) -> list[float]:
    ranks = range(1, client.adapters + 1)
    match client.distribution:
        case "zipf":
            return [1.0 / rank**client.zipf_exponent for rank in ranks]
        case "skewed":
            return [client.skew**-rank for rank in ranks]
    return [1.0] * client.adapters


# ── transient ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Transient adapters come while others are served: each is loaded, asked and unloaded again.


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A copy of `host` under another name comes at `at`; it is unloaded after `stays_s`, answered or not.

    The moments of its requests count from its own arrival.
    """

    number: int
    at: float
    host: AdapterId
    asks: tuple[Arrival, ...]
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
    own: list[Arrival] = []
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
