"""Measures what routing costs: a choice among many replicas, and taking note of a step's events.

python benchmarks/routing_cost.py [--replicas 16 512] [--adapters 1000 10000] [--output FILE]

Times are the processor's, the least of several rounds: on a machine that others use too, what one round is above
another is theirs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from pathlib import Path

from rota.core.events import (
    Admitted,
    Finished,
    FinishReason,
    HostChanged,
    HostState,
    Produced,
    SlotChanged,
    SlotReason,
    SlotState,
)
from rota.core.ids import AdapterId, RequestId, Slot
from rota.core.request import Request, SamplingParams
from rota.runtime.replicas.router import Router

REPLICAS, ADAPTERS, SLOTS, HOST_COPIES = (16, 512), (1000, 10_000), 32, 128
PROMPT_TOKENS, OPEN_EACH = 512, 64  # open requests on each replica
CHOICES, ROUNDS = 500, 8
SAMPLING = SamplingParams(max_new_tokens=4096)
BEGINNING = tuple(range(PROMPT_TOKENS // 2))  # of all prompts for the hot adapter


def held_by(router: Router, replica: int, held: list[AdapterId]) -> None:
    router.note_events(replica, [HostChanged(at=0.0, adapter_id=one, state=HostState.HELD) for one in held])
    slots = [
        SlotChanged(at=0.0, slot=Slot(number), adapter_id=one, state=SlotState.READY)
        for number, one in enumerate(held[:SLOTS])
    ]
    left = SlotChanged(at=0.0, slot=Slot(0), adapter_id=held[0], state=SlotState.EMPTY, reason=SlotReason.IDLE)
    router.note_events(replica, [*slots, left, slots[0]])  # from then on it is known that there are no more slots


def crowded(replicas: int, adapters: int, dice: random.Random) -> Router:
    """Replicas that hold what they can; adapter 1 is in a slot everywhere."""
    router = Router(replicas)
    for replica in range(replicas):
        others = dice.sample(range(2, adapters + 1), HOST_COPIES - 1)
        held_by(router, replica, [AdapterId(number) for number in (1, *others)])
    return router


def request(number: int, dice: random.Random, adapters: int, is_hot: bool) -> Request:
    """For an adapter at random; a hot one is for the adapter that all hold, and begins like all others."""
    begins, first = BEGINNING if is_hot else (), dice.randrange(10**9)
    return Request(
        request_id=RequestId(f"r{number}"),
        prompt=(*begins, *range(first, first + PROMPT_TOKENS - len(begins))),
        sampling=SAMPLING,
        arrived_at=0.0,
        adapter_id=AdapterId(1 if is_hot else dice.randrange(1, adapters + 1)),
    )


def least(replicas: int, adapters: int, is_hot: bool) -> dict[str, float]:
    """The least of several rounds."""
    dice, many = random.Random(1), OPEN_EACH * replicas
    router = crowded(replicas, adapters, dice)
    requests = [request(number, dice, adapters, is_hot) for number in range(many + ROUNDS * CHOICES)]
    for one in requests[:many]:
        router.route(one, 0.0)
    gc.collect()
    gc.disable()
    pairs = list(zip(requests, requests[many:], strict=False))
    rounds = [measure(router, pairs[number * CHOICES :][:CHOICES]) for number in range(ROUNDS)]
    gc.enable()
    return {name: round(min(one[name] for one in rounds), 1) for name in rounds[0]}


def measure(router: Router, pairs: list[tuple[Request, Request]]) -> dict[str, float]:
    """Microseconds, the median over choices: a request ends, another is routed, and its replica makes a step."""
    clock, routing, noting = time.thread_time, [], []
    for done, coming in pairs:
        ended = Finished(request_id=done.request_id, at=0.0, reason=FinishReason.STOP, output_tokens=200)
        router.note_events(router.replica_of(done.request_id) or 0, [ended])
        began_at = clock()
        choice = router.route(coming, 0.0)
        routing.append(clock() - began_at)
        events = [Admitted(request_id=coming.request_id, at=0.0, cached_tokens=0), _step(router, choice.replica)]
        noting_at = clock()
        router.note_events(choice.replica, events)
        noting.append(clock() - noting_at)
    return {
        "route_us": statistics.median(routing) * 1e6,
        "route_p99_us": statistics.quantiles(routing, n=100)[98] * 1e6,
        "note_step_us": statistics.median(noting) * 1e6,
    }


def _step(router: Router, replica: int) -> Produced:
    """A token for every open request of a replica."""
    ids = tuple(router._replicas[replica].open_requests)
    return Produced(at=0.0, request_ids=ids, tokens=(7,) * len(ids), step_s=0.01, prompt_tokens=PROMPT_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--adapters", type=int, nargs="+", default=ADAPTERS, help="for each number of replicas")
    parser.add_argument("--output", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    found = []
    for replicas, adapters in zip(options.replicas, options.adapters, strict=True):
        shape = {"replicas": replicas, "adapters": adapters}
        one = {**shape, "any": least(replicas, adapters, False), "hot": least(replicas, adapters, True)}
        print(f"{replicas} replicas, {adapters} adapters, prompts of {PROMPT_TOKENS} tokens:", flush=True)
        print(f"  adapters at random {one['any']}, one that all hold and prompts that begin alike {one['hot']}")
        found.append(one)
    if options.output:
        options.output.write_text(json.dumps({"load": os.getloadavg()[0], "shapes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
