"""Measures what routing costs: a choice among many replicas, and taking note of a step's events.

python benchmarks/routing_cost.py [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

from rota.core.events import Admitted, Finished, FinishReason, HostChanged, HostState, Produced, SlotChanged, SlotState
from rota.core.ids import AdapterId, RequestId, Slot
from rota.core.request import Request, SamplingParams
from rota.runtime.routing.router import Router

REPLICAS, ADAPTERS, SLOTS, HOST_COPIES = 16, 1000, 32, 128
PROMPT_TOKENS, OPEN = 512, 1024  # open requests, on all replicas together
ROUNDS = 5000
SAMPLING = SamplingParams(max_new_tokens=4096)


def crowded() -> tuple[Router, list[Request]]:
    """Replicas that hold what they can, and requests for adapters at random."""
    dice, router = random.Random(1), Router(REPLICAS)
    for replica in range(REPLICAS):
        held = [AdapterId(number) for number in dice.sample(range(1, ADAPTERS + 1), HOST_COPIES)]
        router.note_events(replica, [HostChanged(at=0.0, adapter_id=one, state=HostState.HELD) for one in held])
        slots = [
            SlotChanged(at=0.0, slot=Slot(slot), adapter_id=held[slot], state=SlotState.READY) for slot in range(SLOTS)
        ]
        router.note_events(replica, slots)
    return router, [request(number, dice) for number in range(OPEN + ROUNDS)]


def request(number: int, dice: random.Random) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        prompt=tuple(dice.randrange(100_000) for _ in range(PROMPT_TOKENS)),
        sampling=SAMPLING,
        arrived_at=0.0,
        adapter_id=AdapterId(dice.randrange(1, ADAPTERS + 1)),
    )


def measure() -> dict[str, float]:
    """Microseconds, the median over rounds: a request ends, another is routed, and its replica makes a step."""
    router, requests = crowded()
    for one in requests[:OPEN]:
        router.route(one, 0.0)
    gc.collect()
    gc.disable()
    routing, noting = [], []
    for done, coming in zip(requests, requests[OPEN:], strict=False):
        ended = Finished(request_id=done.request_id, at=0.0, reason=FinishReason.STOP, output_tokens=200)
        router.note_events(router.replica_of(done.request_id) or 0, [ended])
        began_at = time.perf_counter()
        choice = router.route(coming, 0.0)
        routed_at = time.perf_counter()
        events = [Admitted(request_id=coming.request_id, at=0.0, cached_tokens=0), _step(router, choice.replica)]
        noting_at = time.perf_counter()
        router.note_events(choice.replica, events)
        noting.append(time.perf_counter() - noting_at)
        routing.append(routed_at - began_at)
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
    parser.add_argument("--output", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    found = {name: round(value, 1) for name, value in measure().items()}
    print(f"{REPLICAS} replicas, {ADAPTERS} adapters, prompts of {PROMPT_TOKENS} tokens: {found}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
