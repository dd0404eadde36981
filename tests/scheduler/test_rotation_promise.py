"""What rotation promises, kept under random traffic: nobody stalls for long, and equals are served alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import SchedulerConfig
from rota.core.events import Event, Finished, Preempted, Produced, SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import Message, Submit
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies.rotate import MOST_STRETCH, STEPS_PER_TURN
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import ConstantCost, VirtualWorld
from tests.builders import abort, add_adapter, capacity, request, submit

STEP_S = 0.02
LOAD_S = 0.005

Messages = list[tuple[float, Message]]


def serve(messages: Messages, policy: PolicyConfig, slots: int, rows: int, depth: int = 2) -> list[Event]:
    """Through the virtual world, with KV for everybody."""
    found = capacity(blocks=4096, rows=rows, slots=slots, max_sequence_tokens=4096)
    scheduler = Scheduler(SchedulerConfig(enable_prefix_caching=False, overlap_depth=depth), found, policy)
    events: list[Event] = []
    run(scheduler, VirtualWorld(messages, ConstantCost(STEP_S, LOAD_S)), events.extend, depth)
    scheduler.check()
    return events


def longest_gap_s(events: Iterable[Event]) -> float:
    """Between two tokens of one request."""
    times: dict[str, list[float]] = {}
    for event in events:
        assert not isinstance(event, Preempted)
        if isinstance(event, Produced):
            for request_id in event.request_ids:
                times.setdefault(request_id, []).append(event.at)
    return max((later - earlier for one in times.values() for earlier, later in pairwise(one)), default=0.0)


def slot_time_s(events: Iterable[Event], begin: float, end: float) -> dict[int, float]:
    """How long each adapter sat in a slot between two moments."""
    sat_s: dict[int, float] = {}
    since: dict[int, float] = {}
    for event in events:
        if isinstance(event, SlotChanged) and event.state is SlotState.READY:
            since[event.adapter_id] = event.at
        elif isinstance(event, SlotChanged) and event.adapter_id in since and event.state is SlotState.EMPTY:
            sat_s[event.adapter_id] = sat_s.get(event.adapter_id, 0.0) + max(
                0.0, min(event.at, end) - max(since.pop(event.adapter_id), begin)
            )
    for adapter_id, at in since.items():
        sat_s[adapter_id] = sat_s.get(adapter_id, 0.0) + max(0.0, end - max(at, begin))
    return sat_s


@st.composite
def crowds(draw: st.DrawFn, adapters: int, pinned: int, heaviest: float) -> Messages:
    """Every adapter has work, some more than there are rows for; it comes at random moments, and some of it leaves."""
    messages: Messages = []
    for number in range(1, adapters + 1):
        weight = draw(st.sampled_from([1.0, heaviest]))
        messages.append((0.0, add_adapter(number, weight=weight, is_pinned=number <= pinned)))
        for turn in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, 100)) / 50
            length = draw(st.sampled_from([2, 30, 150]))
            prompt = draw(st.sampled_from([9, 500]))
            asked = request(
                f"r{number}-{turn}", adapter=AdapterId(number), prompt=prompt, max_new_tokens=length, arrived_at=at
            )
            messages.append((at, Submit(replace(asked, priority=draw(st.sampled_from([0, 0, 0, 1, -1]))))))
            if draw(st.integers(0, 4)) == 0:
                left_at = at + draw(st.integers(0, 100)) / 50
                messages.append((left_at, abort(asked.request_id, left_at)))
    return messages


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    slots=st.integers(1, 3),
    more=st.integers(1, 4),
    rows=st.integers(2, 12),
    depth=st.sampled_from([1, 2]),
    quantum_s=st.sampled_from([0.05, 0.1, 0.2]),
    max_stall_s=st.sampled_from([0.02, 0.1, 0.4]),
)
def test_no_sequence_that_runs_goes_without_a_token_longer_than_the_bound(
    data, slots, more, rows, depth, quantum_s, max_stall_s
):
    """With N adapters, R slots that are not pinned, quantum q (times the largest weight), stall limit s, steps of d
    seconds planned k deep and copies of l seconds, two tokens of a sequence that keeps its KV are no further apart than

        L + ⌈(N − slots) / R⌉ · (q + R · c) + (k + 1) · d        where c = l + (k + 1) · d is what a change takes
                                                                 and L = max(s, min(8 · s, 2 · d · (N − slots)))

    Proof. L is the most that the limit may be stretched to. Let a parked sequence's adapter have run last at r. From
    r + L on it is due, and only adapters that were due before it come first. Whoever leaves a slot after that moment
    has run after it, and whoever is asked for the first time after it is due later (or, by priority, once earlier): so
    each of the N − slots claimants comes first at most once. Every q each of the R slots may change hands. Turns
    make one copy at a time, c each: R of them come in a round of q + R · c. One more step or two bring the token back.
    """
    pinned, heaviest = data.draw(st.integers(0, slots - 1)), data.draw(st.sampled_from([1.0, 2.0]))
    messages = data.draw(crowds(slots + more, pinned, heaviest))
    policy = PolicyConfig(lora_rotation_quantum_ms=quantum_s * 1000, lora_max_stall_ms=max_stall_s * 1000)

    rotating = slots - pinned
    change_s = LOAD_S + (depth + 1) * STEP_S
    round_s = heaviest * quantum_s + rotating * change_s
    limit_s = max(max_stall_s, min(MOST_STRETCH * max_stall_s, STEPS_PER_TURN * STEP_S * more))
    bound_s = limit_s + math.ceil(more / rotating) * round_s + (depth + 1) * STEP_S
    assert longest_gap_s(serve(messages, policy, slots, rows, depth)) <= bound_s


def busy(adapters: int, sequences: int, heavy: int | None = None) -> Messages:
    """Adapters that always have as much to do as each other, for longer than ten seconds."""
    messages: Messages = [
        (0.0, add_adapter(number, weight=2.0 if number == heavy else 1.0)) for number in range(1, adapters + 1)
    ]
    for number in range(1, adapters + 1):
        for turn in range(sequences):
            at = 0.1 * turn + 0.01 * number
            asked = submit(f"r{number}-{turn}", adapter=AdapterId(number), prompt=9, max_new_tokens=600, arrived_at=at)
            messages.append((at, asked))
    return messages


@settings(max_examples=15, deadline=None)
@given(slots=st.integers(1, 5), more=st.integers(1, 6), sequences=st.integers(1, 3), begin=st.floats(1.0, 3.0))
def test_equally_weighted_busy_adapters_get_slot_time_within_a_factor_of_two_over_any_ten_seconds(
    slots, more, sequences, begin
):
    events = serve(busy(slots + more, sequences), PolicyConfig(), slots, rows=64)
    assert min(event.at for event in events if isinstance(event, Finished)) > begin + 10.0

    sat_s = slot_time_s(events, begin, begin + 10.0)
    assert len(sat_s) == slots + more
    assert max(sat_s.values()) <= 2.0 * min(sat_s.values())


def test_a_weight_of_two_gives_about_twice_the_slot_time():
    sat_s = slot_time_s(serve(busy(6, 2, heavy=3), PolicyConfig(), slots=2, rows=64), 2.0, 12.0)
    others = [seconds for adapter, seconds in sat_s.items() if adapter != 3]

    assert 1.5 <= sat_s[3] / (sum(others) / len(others)) <= 3.0
