"""The promise of rotation, kept under random traffic: nobody who runs is left without a token for long."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import SchedulerConfig
from rota.core.events import Event, Preempted, Produced
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Message
from rota.core.policy_config import PolicyConfig
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import ConstantCost, VirtualWorld
from tests.builders import add_adapter, capacity, submit

STEP_S = 0.02
LOAD_S = 0.005


def serve(
    messages: Iterable[tuple[float, Message]], policy: PolicyConfig, slots: int, rows: int, depth: int
) -> list[Event]:
    """Through the virtual world, with KV for everybody."""
    found = capacity(blocks=4096, rows=rows, slots=slots, max_sequence_tokens=4096)
    scheduler = Scheduler(SchedulerConfig(enable_prefix_caching=False), found, policy)
    events: list[Event] = []
    run(scheduler, VirtualWorld(messages, ConstantCost(STEP_S, LOAD_S)), events.extend, depth)
    scheduler.check()
    return events


def token_times(events: Iterable[Event]) -> dict[RequestId, list[float]]:
    times: dict[RequestId, list[float]] = {}
    for event in events:
        assert not isinstance(event, Preempted)
        if isinstance(event, Produced):
            for request_id in event.request_ids:
                times.setdefault(request_id, []).append(event.at)
    return times


def longest_gap_s(events: Iterable[Event]) -> float:
    return max(later - earlier for times in token_times(events).values() for earlier, later in pairwise(times))


@st.composite
def crowds(draw: st.DrawFn, adapters: int) -> list[tuple[float, Message]]:
    """Every adapter has work for long, some more than there are rows for, and it comes at random moments."""
    messages: list[tuple[float, Message]] = [
        (0.0, add_adapter(number, weight=draw(st.sampled_from([1.0, 1.0, 2.0])))) for number in range(1, adapters + 1)
    ]
    for number in range(1, adapters + 1):
        for turn in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, 100)) / 50
            length = draw(st.sampled_from([2, 30, 150]))
            asked = submit(
                f"r{number}-{turn}", adapter=AdapterId(number), prompt=9, max_new_tokens=length, arrived_at=at
            )
            messages.append((at, asked))
    return messages


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2]))
def test_no_sequence_that_runs_goes_without_a_token_longer_than_the_bound(data, slots, more, depth):
    adapters = slots + more
    quantum_ms, stall_ms = data.draw(st.sampled_from([50.0, 100.0, 200.0])), data.draw(st.sampled_from([100.0, 400.0]))
    rows = data.draw(st.integers(adapters, 12))
    policy = PolicyConfig(lora_rotation_quantum_ms=quantum_ms, lora_max_stall_ms=stall_ms)
    messages = data.draw(crowds(adapters))

    gap_s = longest_gap_s(serve(messages, policy, slots, rows, depth))

    weight = 2.0
    change_s = LOAD_S + (depth + 1) * STEP_S
    rounds = math.ceil(more / slots)
    bound_s = stall_ms / 1000 + rounds * (weight * quantum_ms / 1000 + slots * change_s) + (depth + 1) * STEP_S
    assert gap_s <= bound_s
